"""Qwen3: a norm over each head of queries and keys, and a sliding window as Qwen2 has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families import qwen2
from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(qwen2.Config, frozen=True, kw_only=True):
    head_dim: int | None = 128
    attention_bias: bool = False


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    bias = found.attention_bias
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm())
    return replace(found.decoder(found.rope(config)), attention=attention)


PLUGIN = read
