"""Qwen3-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3_moe
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen3Moe(Decoder):
    """A norm over each head of queries and keys, and experts."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen3_moe.read(config), options)


PLUGIN = Qwen3Moe
