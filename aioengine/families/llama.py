"""Llama, with optional biases in attention and MLP."""

from __future__ import annotations

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import DecoderConfig, DecoderFamily


class LlamaFamily(DecoderFamily, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False

    def decoder(self) -> DecoderConfig:
        decoder, bias = super().decoder(), self.attention_bias
        return replace(
            decoder,
            attention=AttentionConfig(qkv_bias=bias, output_bias=bias),
            mlp=replace(decoder.mlp, has_bias=self.mlp_bias),
        )


class SeedOssFamily(LlamaFamily, frozen=True, kw_only=True):
    """Seed-OSS: Llama with biases on queries, keys and values."""

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        return replace(decoder, attention=replace(decoder.attention, output_bias=self.attention_out_bias))


PLUGIN = LlamaFamily
