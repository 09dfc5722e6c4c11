"""Llama, with optional biases in attention and MLP, and families that differ from it by few fields."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig
from aioengine.families._config import DecoderFamily
from aioengine.families._rope_config import RopeConfig


class LlamaFamily(DecoderFamily, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class SeedOssFamily(DecoderFamily, frozen=True, kw_only=True):
    """Seed-OSS: Llama with biases on queries, keys and values."""

    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524_288
    qkv_bias: bool = field(default=True, name="attention_bias")
    output_bias: bool = field(default=False, name="attention_out_bias")
    mlp_bias: bool = False


class Ernie45Family(DecoderFamily, frozen=True, kw_only=True):
    """ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

    default_theta = 5e5
    attention = AttentionConfig(is_interleaved=True)

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool | None = field(default=False, name="use_bias")

    @property
    def mlp_bias(self) -> bool:
        return bool(self.attention_bias)


class GlmFamily(DecoderFamily, frozen=True, kw_only=True):
    """GLM-4 (2024) and GLM-Edge: interleaved rotary embedding on half of each head."""

    default_partial = 0.5
    attention = AttentionConfig(is_interleaved=True)
    mlp = MlpConfig(first=("gate_up_proj",))

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    max_position_embeddings: int = 131_072
    qkv_bias: bool = field(default=True, name="attention_bias")


class Glm4Family(GlmFamily, frozen=True, kw_only=True):
    """GLM-4 (2025): norms before and after attention and MLP."""

    block = BlockConfig(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")


class SmolLM3Family(LlamaFamily, frozen=True, kw_only=True):
    """SmolLM3: Llama without rotary embedding in every fourth layer."""

    default_theta = 2e6

    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_length("no_rope_layers", self.rotated)

    def has_window(self, layer: int) -> bool:
        return not self.rotated[layer]

    @property
    def rotated(self) -> list[bool]:
        """For each layer, whether it has a rotary embedding."""
        if self.no_rope_layers is not None:  # despite its name, 1 means that a layer has one
            return [bool(value) for value in self.no_rope_layers[: self.num_hidden_layers]]
        return [(layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers)]

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope = self.rope
        return tuple(rope if is_rotated else None for is_rotated in self.rotated)


PLUGIN = LlamaFamily
