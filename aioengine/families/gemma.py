"""Gemma: scaled embeddings, norms with offsets, and from Gemma 2 on norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._rope_config import RopeConfig, read_layer_rope

Positive = Annotated[float, Meta(gt=0)]


class GemmaFamily(DecoderFamily, frozen=True, kw_only=True):
    """Gemma 1: Llama with GELU, scaled embeddings, and norm weights stored as offsets from 1."""

    norm = NormConfig(offset=1.0)

    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: Literal[False] | None = None

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        if self.hidden_act == "gelu":  # older files; the reference uses the tanh approximation
            decoder = replace(decoder, mlp=replace(decoder.mlp, activation="gelu_tanh"))
        return decoder


class Gemma2Family(GemmaFamily, frozen=True, kw_only=True):
    """Gemma 2: norms before and after attention and MLP, soft caps, sliding windows in every other layer."""

    sliding_window_pattern = 2
    block = BlockConfig(
        attention_output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )

    num_key_value_heads: int | None = 4
    hidden_act: str = field(default="gelu_pytorch_tanh", name="hidden_activation")
    sliding_window: int | None = 4096
    query_scalar: Positive = field(default=256, name="query_pre_attn_scalar")
    logits_cap: Positive | None = field(default=30.0, name="final_logit_softcapping")
    attention_cap: Positive | None = field(default=50.0, name="attn_logit_softcapping")

    decoder = DecoderFamily.decoder  # in these files, "gelu" means the exact GELU

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(scale=self.query_scalar**-0.5, soft_cap=self.attention_cap)


class Gemma3TextFamily(Gemma2Family, frozen=True, kw_only=True):
    """Gemma 3, text only: Gemma 2 with query and key norms, and a separate RoPE in sliding-window layers."""

    max_position_embeddings: int = 131_072
    sliding_window_pattern: Annotated[int, Meta(ge=1)] = 6
    rope_local_base_freq: float | None = None
    rope_parameters: Mapping[str, Mapping[str, object] | None] | None = None
    logits_cap: Positive | None = field(default=None, name="final_logit_softcapping")
    attention_cap: None = field(default=None, name="attn_logit_softcapping")  # transformers ignores it

    @property
    def attention(self) -> AttentionConfig:
        return AttentionConfig(scale=self.query_scalar**-0.5, head_norm=HeadNorm(norm=self.norm))

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of sliding-window layers.

        It is the main one because ``max_position_embeddings`` already includes the scaling of the full layers.
        """
        parameters = self.rope_parameters or {}
        return read_layer_rope(parameters.get("sliding_attention"), None, self.rope_local_base_freq or 1e4)

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        parameters = (self.rope_parameters or {}).get("full_attention")
        theta = 1e6 if self.rope_theta is None else self.rope_theta
        rope, full_rope = self.rope, read_layer_rope(parameters, self.rope_scaling, theta)
        full_rope.check_head(self.head_size)
        return tuple(full_rope if kind == "full_attention" else rope for kind in self.layer_kinds)


PLUGIN = GemmaFamily
