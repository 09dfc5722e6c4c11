"""Cohere (Command R, R+, Aya): parallel attention and MLP, LayerNorm, interleaved rotary embedding."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderFamily
from aioengine.families._rope_config import RopeConfig


class CohereFamily(DecoderFamily, frozen=True, kw_only=True):
    default_theta = 5e5
    norm = NormConfig(kind="layer")
    block = BlockConfig(is_parallel=True, mlp_norm="")

    rms_norm_eps: float = field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logits_scale: float = field(default=0.0625, name="logit_scale")
    attention_bias: bool = False
    use_qk_norm: bool = False

    @property
    def attention(self) -> AttentionConfig:
        head_norm = HeadNorm(norm=self.norm, extent="each_head") if self.use_qk_norm else None
        return AttentionConfig(is_interleaved=True, head_norm=head_norm)


class Cohere2Family(CohereFamily, frozen=True, kw_only=True):
    """Cohere 2 (Command R7B, Command A): Cohere with sliding windows, no RoPE in full-attention layers."""

    default_theta = 10_000.0

    use_qk_norm: Literal[False] | None = False
    sliding_window: int | None = 4096
    sliding_window_pattern: Annotated[int, Meta(ge=1)] = 4

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope, windows = self.rope, self.windows or (None,) * self.num_hidden_layers
        return tuple(None if window is None else rope for window in windows)


PLUGIN = CohereFamily
