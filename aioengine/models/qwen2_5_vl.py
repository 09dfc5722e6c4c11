"""Qwen2.5-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen2_5_vl
from aioengine.models._qwen_decoder import QwenVision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen25VL(QwenVision):
    """Most layers of the tower attend within windows."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, qwen2_5_vl.read(config), options)


PLUGIN = Qwen25VL
