"""Gemma 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gemma2
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Gemma2(Decoder):
    """Norms before and behind attention and MLP; scores and logits are capped."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gemma2.read(config), options)


PLUGIN = Gemma2
