"""ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import DecoderConfig, DecoderFamily


class Ernie45Family(DecoderFamily, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 5e5

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    use_bias: bool | None = False

    def decoder(self) -> DecoderConfig:
        decoder, bias = super().decoder(), bool(self.use_bias)
        return replace(
            decoder,
            attention=AttentionConfig(qkv_bias=bias, output_bias=bias, is_interleaved=True),
            mlp=replace(decoder.mlp, has_bias=bias),
        )


PLUGIN = Ernie45Family
