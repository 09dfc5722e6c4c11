"""Cohere 2 (Command R7B, Command A): Cohere with sliding windows, no RoPE in full-attention layers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig
from aioengine.families._config import DecoderConfig, WindowFamily


class Cohere2Family(WindowFamily, frozen=True, kw_only=True):
    norm = NormConfig(kind="layer")
    block = BlockConfig(is_parallel=True, mlp_norm="")

    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 4

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    def decoder(self) -> DecoderConfig:
        decoder, bias = super().decoder(), self.attention_bias
        windows = decoder.windows or (None,) * decoder.num_layers
        return replace(
            decoder,
            attention=AttentionConfig(qkv_bias=bias, output_bias=bias, is_interleaved=True),
            layer_ropes=tuple(None if window is None else decoder.rope for window in windows),
            logits_scale=self.logit_scale,
        )


PLUGIN = Cohere2Family
