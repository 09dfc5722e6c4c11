"""Gemma, the first: a Llama with GELU, scaled embeddings, and norms whose weights are offsets from 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config
from aioengine.families.gemma2 import NORM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: Literal[False] | None = None


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    decoder, bias = found.decoder(found.rope(config)), found.attention_bias
    if found.hidden_act == "gelu":  # the first files say so, and mean the approximation
        decoder = replace(decoder, mlp=replace(decoder.mlp, activation="gelu_tanh"))
    return replace(
        decoder,
        norm=NORM,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias),
        embedding_scale=found.hidden_size**0.5,
    )


PLUGIN = read
