"""Qwen3.5, its text model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3_5_text
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen35Text(HybridDecoder):
    """See ``families.qwen3_5_text``."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen3_5_text.read(config), options)


PLUGIN = Qwen35Text
