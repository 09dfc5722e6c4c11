"""Qwen3.5 as it is published, of which the text model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3_5
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen35(HybridDecoder):
    """See ``families.qwen3_5``."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen3_5.read(config), options)


PLUGIN = Qwen35
