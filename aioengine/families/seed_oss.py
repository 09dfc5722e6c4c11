"""Seed-OSS: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    decoder = found.decoder(found.rope(config))
    return replace(
        decoder,
        attention=AttentionConfig(qkv_bias=found.attention_bias, output_bias=found.attention_out_bias),
        mlp=replace(decoder.mlp, has_bias=found.mlp_bias),
    )


PLUGIN = read
