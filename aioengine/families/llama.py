"""Llama: biases, where there are any, on all projections of attention, or of the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    decoder = found.decoder(found.rope(config))
    return replace(
        decoder,
        attention=AttentionConfig(qkv_bias=found.attention_bias, output_bias=found.attention_bias),
        mlp=replace(decoder.mlp, has_bias=found.mlp_bias),
    )


PLUGIN = read
