"""Gemma 3 without images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import gemma3_text
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Gemma3Text(Decoder):
    """As Gemma 2, with norms of heads, and two rotations."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(gemma3_text.read(config), options)


PLUGIN = Gemma3Text
