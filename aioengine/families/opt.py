"""OPT: learned positions, norms before attention and MLP, ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig, TensorNames
from aioengine.families._config import FamilyConfig, RopeConfig, decode_config, not_implemented

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    intermediate_size: int = msgspec.field(name="ffn_dim")
    hidden_act: str = msgspec.field(default="relu", name="activation_function")
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    has_bias: bool = msgspec.field(default=True, name="enable_bias")
    layer_norm_elementwise_affine: bool = True
    without_last_norm: Literal[False] = msgspec.field(default=False, name="_remove_final_layer_norm")

    @property
    def num_kv_heads(self) -> int:
        """All heads have keys and values of their own, whatever ``num_key_value_heads`` says."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The heads divide the size of the model, whatever ``head_dim`` says."""
        return self.hidden_size // self.num_attention_heads

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.do_layer_norm_before:
            not_implemented("do_layer_norm_before", self.do_layer_norm_before, "true, as in all but OPT-350M")
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            not_implemented(
                "word_embed_proj_dim", self.word_embed_proj_dim, f"hidden_size, which is {self.hidden_size}"
            )


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    decoder, bias, has_weight = found.decoder(RopeConfig()), found.has_bias, found.layer_norm_elementwise_affine
    return replace(
        decoder,
        names=TensorNames(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            first_position=2,
            layers="model.decoder.layers",
            norm="model.decoder.final_layer_norm",
        ),
        epsilon=1e-5,
        norm=NormConfig(kind="layer", has_weight=has_weight, has_bias=has_weight),
        block=BlockConfig(mlp="", attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm"),
        attention=AttentionConfig(output="out_proj", qkv_bias=bias, output_bias=bias),
        mlp=replace(decoder.mlp, first=("fc1",), second="fc2", is_gated=False, has_bias=bias),
        layer_ropes=(None,) * decoder.num_layers,
    )


PLUGIN = read
