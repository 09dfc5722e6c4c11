"""Qwen2-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen2_vl
from aioengine.models._qwen_decoder import QwenVision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen2VL(QwenVision):
    """All layers of the tower attend to all of a frame."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, qwen2_vl.read(config), options)


PLUGIN = Qwen2VL
