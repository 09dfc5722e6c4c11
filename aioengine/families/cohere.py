"""Cohere (Command R, R+, Aya 23): parallel attention and MLP, LayerNorm, interleaved rotary embedding."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily


class CohereFamily(DecoderFamily, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 5e5
    norm = NormConfig(kind="layer")
    block = BlockConfig(is_parallel=True, mlp_norm="")

    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    use_qk_norm: bool = False

    def decoder(self) -> DecoderConfig:
        bias = self.attention_bias
        head_norm = HeadNorm(norm=self.norm, extent="each_head") if self.use_qk_norm else None
        return replace(
            super().decoder(),
            attention=AttentionConfig(qkv_bias=bias, output_bias=bias, is_interleaved=True, head_norm=head_norm),
            logits_scale=self.logit_scale,
        )


PLUGIN = CohereFamily
