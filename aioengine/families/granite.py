"""Granite: a Llama whose embeddings, residuals, attention scores and logits have factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, check_factor, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor("logits_scaling", abs(self.logits_scaling))
        check_factor("residual_multiplier", self.residual_multiplier)


def read(config: Mapping[str, object]) -> DecoderConfig:
    return granite_decoder(decode_config(config, Config), config)


def granite_decoder(found: Config, config: Mapping[str, object]) -> DecoderConfig:
    """The decoder of ``config``, whose fields ``found`` has.

    Its residual stream is that of Granite divided by ``residual_multiplier``, so that the outputs of attention and MLP
    are added as they are. The norms, which read the stream, undo it.
    """
    decoder, bias = found.decoder(found.rope(config)), found.attention_bias
    return replace(
        decoder,
        epsilon=decoder.epsilon / found.residual_multiplier**2,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, scale=found.attention_multiplier),
        mlp=replace(decoder.mlp, has_bias=found.mlp_bias),
        stream_scale=found.embedding_multiplier / found.residual_multiplier,
        logits_scale=1 / found.logits_scaling,
    )


PLUGIN = read
