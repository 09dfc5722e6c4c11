"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import qwen3_next
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Qwen3Next(HybridDecoder):
    """See ``families.qwen3_next``."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(qwen3_next.read(config), options)


PLUGIN = Qwen3Next
