"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen2
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen2(Decoder):
    """Biases on queries, keys and values."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen2.read(config), options)


PLUGIN = Qwen2
