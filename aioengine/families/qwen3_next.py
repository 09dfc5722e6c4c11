"""Qwen3-Next: gated delta nets, and in some layers attention whose outputs are gated, rotated in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, DeltaNetConfig, HeadNorm, NormConfig
from aioengine.families._config import FamilyConfig, decode_config, not_implemented

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 0.25

    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    layer_types: list[Literal["full_attention", "linear_attention"]] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    num_experts: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts:
            not_implemented("num_experts", self.num_experts, "0")
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            if not 1 <= getattr(self, name) <= 256:
                not_implemented(name, getattr(self, name), "1 to 256")
        if self.linear_conv_kernel_dim < 2:
            not_implemented("linear_conv_kernel_dim", self.linear_conv_kernel_dim, "at least 2")
        if self.full_attention_interval < 1:
            not_implemented("full_attention_interval", self.full_attention_interval, "at least 1")
        if not 1 <= self.linear_num_key_heads <= self.linear_num_value_heads <= 2**14:
            not_implemented("linear_num_key_heads", self.linear_num_key_heads, "1 to linear_num_value_heads")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            not_implemented("linear_num_key_heads", self.linear_num_key_heads, "a divisor of linear_num_value_heads")
        if not 0 < len(self.linear_layers) < self.num_hidden_layers:
            not_implemented("layer_types", self.layer_types, "some layers of each kind")

    @property
    def linear_layers(self) -> frozenset[int]:
        """The layers without attention."""
        if self.layer_types is None:
            interval = self.full_attention_interval
            return frozenset(layer for layer in range(self.num_hidden_layers) if (layer + 1) % interval)
        return frozenset(layer for layer, kind in enumerate(self.layer_types) if kind == "linear_attention")


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    bias, norm = found.attention_bias, NormConfig(offset=1.0)
    return replace(
        found.decoder(found.rope(config)),
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm(norm=norm), has_output_gate=True),
        delta_net=DeltaNetConfig(
            layers=found.linear_layers,
            num_value_heads=found.linear_num_value_heads,
            num_key_heads=found.linear_num_key_heads,
            value_size=found.linear_value_head_dim,
            key_size=found.linear_key_head_dim,
            width=found.linear_conv_kernel_dim,
        ),
        norm=norm,
        keeps_states=True,
        ignored=("mtp.",),
    )


PLUGIN = read
