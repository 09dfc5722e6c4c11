"""Qwen2: biases on queries, keys and values, and a sliding window in the upper layers if it is switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._config import FamilyConfig, decode_config, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


def read(config: Mapping[str, object]) -> DecoderConfig:
    return replace(decode_config(config, Config).decoder(read_rope(config)), qkv_bias=True)


PLUGIN = read
