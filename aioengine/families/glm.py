"""GLM-4 (2024) and GLM-Edge: interleaved rotary embedding on half of each head."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig
from aioengine.families._config import DecoderConfig, DecoderFamily


class GlmFamily(DecoderFamily, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 0.5
    mlp = MlpConfig(first=("gate_up_proj",))

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    max_position_embeddings: int = 131_072
    attention_bias: bool = True

    def decoder(self) -> DecoderConfig:
        attention = AttentionConfig(qkv_bias=self.attention_bias, is_interleaved=True)
        return replace(super().decoder(), attention=attention)


class Glm4Family(GlmFamily, frozen=True, kw_only=True):
    """GLM-4 (2025): norms before and after attention and MLP."""

    block = BlockConfig(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


PLUGIN = GlmFamily
