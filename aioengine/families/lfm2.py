"""LFM2, dense: short gated convolutions, and attention with query and key norms in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import (
    AttentionConfig,
    BlockConfig,
    HeadNorm,
    MlpConfig,
    ShortConvConfig,
    TensorNames,
)
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._fields import check_factor, not_implemented


class Lfm2Family(DecoderFamily, frozen=True, kw_only=True):
    default_theta = 1e6
    keeps_states = True
    limits: ClassVar[Mapping[str, tuple[int, int]]] = {"conv_width": (2, 64), "block_multiple_of": (1, 2**24)}
    names = TensorNames(norm="model.embedding_norm")
    block = BlockConfig(mlp="feed_forward.", attention_norm="operator_norm", mlp_norm="ffn_norm")
    attention = AttentionConfig(output="out_proj", head_norm=HeadNorm(names=("q_layernorm", "k_layernorm")))
    mlp = MlpConfig(first=("w1", "w3"), second="w2")

    intermediate_size: int = 12_288
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = field(default=1e-5, name="norm_eps")
    max_position_embeddings: int = 128_000
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    layer_types: list[Literal["full_attention", "conv"]] | None = None
    attention_layers: list[int] | None = field(default=None, name="full_attn_idxs")
    conv_bias: bool = False
    conv_width: int = field(default=3, name="conv_L_cache")
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.conv_layers) < self.num_hidden_layers:
            not_implemented("layer_types", self.layer_types, "layers of both types")
        if self.block_ffn_dim_multiplier is not None:
            check_factor("block_ffn_dim_multiplier", self.block_ffn_dim_multiplier)
        if not 1 <= self.inner_size <= 2**24:
            not_implemented("block_ff_dim", self.block_ff_dim, "an inner size of 1 to 2**24")

    @property
    def conv_layers(self) -> frozenset[int]:
        """The layers with a convolution."""
        layers = range(self.num_hidden_layers)
        if self.layer_types is None:
            return frozenset(layers) - frozenset(layers if self.attention_layers is None else self.attention_layers)
        return frozenset(layer for layer in layers if self.layer_types[layer] == "conv")

    @property
    def inner_size(self) -> int:
        """The inner size of the MLP."""
        size = self.intermediate_size if self.block_ff_dim is None else self.block_ff_dim
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        return -(-int(self.block_ffn_dim_multiplier * size) // self.block_multiple_of) * self.block_multiple_of

    @property
    def short_conv(self) -> ShortConvConfig:
        return ShortConvConfig(layers=self.conv_layers, width=self.conv_width, has_bias=self.conv_bias)

    def decoder(self) -> DecoderConfig:
        tied = self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding
        return replace(super().decoder(), intermediate_size=self.inner_size, tied=tied)


PLUGIN = Lfm2Family
