"""Qwen3-VL, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3_vl
from aioengine.models._qwen_decoder import QwenVision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen3VL(QwenVision):
    """Patches have learned positions too; some layers of the tower give features for the first layers of the text."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, qwen3_vl.read(config), options)


PLUGIN = Qwen3VL
