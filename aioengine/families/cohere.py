"""Cohere (Command R, R+, Aya): parallel attention and MLP, LayerNorm, interleaved rotary embedding."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily, WindowFamily


class CohereFamily(DecoderFamily, frozen=True, kw_only=True):
    default_theta = 5e5
    norm = NormConfig(kind="layer")
    block = BlockConfig(is_parallel=True, mlp_norm="")
    attention = AttentionConfig(is_interleaved=True)

    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    use_qk_norm: bool = False

    def decoder(self) -> DecoderConfig:
        decoder = replace(super().decoder(), logits_scale=self.logit_scale)
        if not self.use_qk_norm:
            return decoder
        head_norm = HeadNorm(norm=self.norm, extent="each_head")
        return replace(decoder, attention=replace(decoder.attention, head_norm=head_norm))


class Cohere2Family(WindowFamily, frozen=True, kw_only=True):
    """Cohere 2 (Command R7B, Command A): Cohere with sliding windows, no RoPE in full-attention layers."""

    norm = CohereFamily.norm
    block = CohereFamily.block
    attention = CohereFamily.attention

    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 4

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        windows = decoder.windows or (None,) * decoder.num_layers
        return replace(
            decoder,
            layer_ropes=tuple(None if window is None else decoder.rope for window in windows),
            logits_scale=self.logit_scale,
        )


PLUGIN = CohereFamily
