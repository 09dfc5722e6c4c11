"""Gemma 1: Llama with GELU, scaled embeddings, and norm weights stored as offsets from 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily, WindowFamily
from aioengine.families._rope_config import RopeConfig, read_layer_rope

Positive = Annotated[float, msgspec.Meta(gt=0)]
NORM: Final = NormConfig(offset=1.0)


class GemmaFamily(DecoderFamily, frozen=True, kw_only=True):
    norm = NORM

    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: Literal[False] | None = None

    def decoder(self) -> DecoderConfig:
        decoder = replace(super().decoder(), embedding_scale=self.hidden_size**0.5)
        if self.hidden_act == "gelu":  # older files; the reference uses the tanh approximation
            decoder = replace(decoder, mlp=replace(decoder.mlp, activation="gelu_tanh"))
        return decoder


class Gemma2Family(WindowFamily, frozen=True, kw_only=True):
    """Gemma 2: norms before and after attention and MLP, soft caps, sliding windows in every other layer."""

    norm = NORM
    block = BlockConfig(
        attention_output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_output_norm="post_feedforward_layernorm",
    )

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_scalar: Positive = msgspec.field(default=256, name="query_pre_attn_scalar")
    final_logit_softcapping: Positive | None = 30.0
    attention_cap: Positive | None = msgspec.field(default=50.0, name="attn_logit_softcapping")
    use_bidirectional_attention: Literal[False] | None = None

    def has_window(self, layer: int) -> bool:
        return layer % 2 == 0

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        return replace(
            decoder,
            attention=replace(decoder.attention, scale=self.query_scalar**-0.5, soft_cap=self.attention_cap),
            embedding_scale=self.hidden_size**0.5,
            logits_cap=self.final_logit_softcapping,
        )


class Gemma3TextFamily(Gemma2Family, frozen=True, kw_only=True):
    """Gemma 3, text only: Gemma 2 with query and key norms, and a separate RoPE in sliding-window layers."""

    max_position_embeddings: int = 131_072
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 6
    rope_local_base_freq: float | None = None
    rope_parameters: Mapping[str, Mapping[str, object] | None] | None = None
    final_logit_softcapping: Positive | None = None
    attention_cap: None = msgspec.field(default=None, name="attn_logit_softcapping")  # transformers ignores it

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of sliding-window layers.

        It is the main one because ``max_position_embeddings`` already includes the scaling of the full layers.
        """
        parameters = self.rope_parameters or {}
        return read_layer_rope(parameters.get("sliding_attention"), None, self.rope_local_base_freq or 1e4)

    @property
    def full_rope(self) -> RopeConfig:
        """The rotary embedding of full-attention layers."""
        parameters = self.rope_parameters or {}
        theta = 1e6 if self.rope_theta is None else self.rope_theta
        return read_layer_rope(parameters.get("full_attention"), self.rope_scaling, theta)

    def decoder(self) -> DecoderConfig:
        decoder, full_rope = super().decoder(), self.full_rope
        full_rope.check_head(decoder.head_size)
        is_full = [kind == "full_attention" for kind in self.layer_kinds]
        return replace(
            decoder,
            attention=replace(decoder.attention, head_norm=HeadNorm(norm=NORM)),
            layer_ropes=tuple(full_rope if full else decoder.rope for full in is_full),
        )


PLUGIN = GemmaFamily
