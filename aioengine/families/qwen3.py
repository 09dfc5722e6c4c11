"""Qwen3: a norm over each head of queries and keys, and a sliding window as Qwen2 has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._config import FamilyConfig, decode_config, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return replace(
        found.decoder(read_rope(config)),
        qkv_bias=found.attention_bias,
        output_bias=found.attention_bias,
        head_norm=found.rms_norm_eps,
    )


PLUGIN = read
