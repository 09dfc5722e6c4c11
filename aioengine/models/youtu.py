"""Youtu-LLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import youtu
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Youtu(Decoder):
    """Latent attention."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(youtu.read(config), options)


PLUGIN = Youtu
