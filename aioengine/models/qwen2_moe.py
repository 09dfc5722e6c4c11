"""Qwen2-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen2_moe
from aioengine.models._decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen2Moe(Decoder):
    """Experts, and one that all tokens share."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen2_moe.read(config), options)


PLUGIN = Qwen2Moe
