"""OLMo and EXAONE 4: most have norms after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._experts import ExpertsConfig
from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig, read_layer_rope

POST_NORMS: Final = BlockConfig(
    attention_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
"""Norms after attention and MLP, none before them."""


class OlmoFamily(DecoderFamily, frozen=True, kw_only=True):
    """OLMo 1: Llama with LayerNorm without weights."""

    norm = NormConfig(kind="layer", has_weight=False)

    attention_bias: bool = False
    clip_qkv: Annotated[float, Meta(gt=0)] | None = None

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(clip=self.clip_qkv)

    def decoder(self) -> DecoderConfig:
        return replace(super().decoder(), epsilon=1e-5)


class Olmo2Family(DecoderFamily, frozen=True, kw_only=True):
    """OLMo 2: norms after attention and MLP, and norms over all query heads and all key heads."""

    norm = NormConfig(scales_in_fp32=True)
    block = POST_NORMS
    attention = AttentionConfig(head_norm=HeadNorm(norm=norm, extent="all_heads"))

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Olmo3Family(Olmo2Family, frozen=True, kw_only=True):
    """OLMo 3: OLMo 2 with sliding windows in three of four layers, and a separate RoPE in these."""

    default_theta = 5e5
    sliding_window_pattern = 4

    sliding_window: int | None = 4096
    rope_parameters: Mapping[str, Mapping[str, object] | None] | None = None

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of full-attention layers. Only these have a scaling."""
        parameters = (self.rope_parameters or {}).get("full_attention")
        return read_layer_rope(parameters, self.rope_scaling, self.rope_theta or self.default_theta)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        parameters = (self.rope_parameters or {}).get("sliding_attention")
        rope, window_rope = self.rope, read_layer_rope(parameters, None, self.default_theta)
        return tuple(rope if kind == "full_attention" else window_rope for kind in self.layer_kinds)


class OlmoeFamily(DecoderFamily, frozen=True, kw_only=True):
    """OLMoE: norms over all query heads and all key heads, and experts in all layers."""

    attention = AttentionConfig(head_norm=HeadNorm(extent="all_heads"))
    experts = ExpertsConfig()

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    clip_qkv: None = None
    num_experts: int = 64
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    norm_topk_prob: bool = False


class Exaone4Family(DecoderFamily, frozen=True, kw_only=True):
    """EXAONE 4: norms after attention and MLP, no rotary embedding in full-attention layers next to sliding windows."""

    block = POST_NORMS
    attention = AttentionConfig(head_norm=HeadNorm())

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.window is not None and (not isinstance(pattern, int) or pattern < 1):
            not_implemented("sliding_window_pattern", pattern, "a positive integer, or a list in layer_types")

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope = self.rope
        return tuple(None if window is None else rope for window in self.windows)


PLUGIN = OlmoFamily
