"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import decode_config, not_implemented
from aioengine.families._delta_nets import DeltaNetFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(DeltaNetFamily, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 2
    num_experts: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts:
            not_implemented("num_experts", self.num_experts, "0")


def read(config: Mapping[str, object]) -> DecoderConfig:
    return decode_config(config, Config).hybrid(config, is_grouped=True)


PLUGIN = read
