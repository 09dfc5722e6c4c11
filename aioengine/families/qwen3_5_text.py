"""Qwen3.5 without its vision tower: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._config import decode_config
from aioengine.families._delta_nets import DeltaNetFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(DeltaNetFamily, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4


def read(config: Mapping[str, object]) -> DecoderConfig:
    decoder = decode_config(config, Config).hybrid(config, is_grouped=False)
    # the three axes of a position are the same for text
    return replace(decoder, rope=replace(decoder.rope, mrope_section=(), mrope_interleaved=False))


PLUGIN = read
