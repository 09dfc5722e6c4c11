"""OPT: learned positions, pre-norm, ReLU."""

from __future__ import annotations

from typing import Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._fields import not_implemented
from aioengine.families.gpt2 import UNREAD


class OptFamily(DecoderFamily, frozen=True, kw_only=True):
    unread = UNREAD
    names = TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        first_position=2,
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
    )
    block = BlockConfig(mlp="", attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm")
    attention = AttentionConfig(output="out_proj")
    mlp = MlpConfig(first=("fc1",), second="fc2", is_gated=False)

    intermediate_size: int = field(name="ffn_dim")
    hidden_act: str = field(default="relu", name="activation_function")
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    attention_bias: bool = field(default=True, name="enable_bias")
    has_norm_weights: bool = field(default=True, name="layer_norm_elementwise_affine")
    without_last_norm: Literal[False] = field(default=False, name="_remove_final_layer_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_layer_norm_before:
            not_implemented("do_layer_norm_before", self.do_layer_norm_before, "true (all models except OPT-350M)")
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            not_implemented("word_embed_proj_dim", self.word_embed_proj_dim, f"hidden_size ({self.hidden_size})")

    @property
    def mlp_bias(self) -> bool:
        return self.attention_bias

    @property
    def norm(self) -> NormConfig:
        return NormConfig(kind="layer", has_weight=self.has_norm_weights, has_bias=self.has_norm_weights)

    def decoder(self) -> DecoderConfig:
        return replace(super().decoder(), epsilon=1e-5, layer_ropes=(None,) * self.num_hidden_layers)


PLUGIN = OptFamily
