"""Gemma, the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gemma
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Gemma(Decoder):
    """GELU, scaled embeddings, and norms whose weights are offsets from 1."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gemma.read(config), options)


PLUGIN = Gemma
