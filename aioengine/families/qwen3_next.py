"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts, and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from msgspec import field

from aioengine.families._block_config import AttentionConfig, DeltaNetConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderFamily
from aioengine.families._experts import ExpertsConfig, SharedConfig
from aioengine.families._fields import not_implemented

_MAX_HEAD: Final = 128
"""Maximum size of a key or value head. The kernels keep a block of tokens in the shared memory of a GPU."""


class DeltaNetFamily(DecoderFamily, frozen=True, kw_only=True):
    """The base class of families with gated delta nets, and gated attention with partial rotary embedding.

    By default, every ``full_attention_interval``-th layer has attention, and the others have a delta net. ``config``
    copies attributes with the names of ``DecoderConfig`` fields, such as ``delta_net``.

    Attributes:
        is_grouped: see ``DeltaNetConfig``.
    """

    default_partial = 0.25
    keeps_states = True
    ignored = ("mtp.",)
    is_grouped: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, tuple[int, int]]] = {
        "full_attention_interval": (1, 2**14),
        "linear_conv_kernel_dim": (2, 128),
        "linear_key_head_dim": (1, _MAX_HEAD),
        "linear_value_head_dim": (1, _MAX_HEAD),
        "linear_num_value_heads": (1, 2**14),
    }
    norm = NormConfig(offset=1.0)
    attention = AttentionConfig(head_norm=HeadNorm(norm=norm), has_output_gate=True)

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_num_key_heads < 1 or self.linear_num_value_heads % self.linear_num_key_heads:
            divisor = f"a divisor of {self.linear_num_value_heads} value heads"
            not_implemented("linear_num_key_heads", self.linear_num_key_heads, divisor)
        if not 0 < len(self.linear_layers) < self.num_hidden_layers:
            not_implemented("layer_types", self.layer_types, "layers of both types")

    @property
    def linear_layers(self) -> frozenset[int]:
        """The layers with a delta net."""
        if self.layer_types is None:
            interval = self.full_attention_interval
            return frozenset(layer for layer in range(self.num_hidden_layers) if (layer + 1) % interval)
        return frozenset(layer for layer, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def delta_net(self) -> DeltaNetConfig:
        return DeltaNetConfig(
            layers=self.linear_layers,
            num_value_heads=self.linear_num_value_heads,
            num_key_heads=self.linear_num_key_heads,
            value_size=self.linear_value_head_dim,
            key_size=self.linear_key_head_dim,
            width=self.linear_conv_kernel_dim,
            is_grouped=self.is_grouped,
        )


class Qwen3NextFamily(DeltaNetFamily, frozen=True, kw_only=True):
    """Qwen3-Next. If ``num_experts`` is 0, all layers have an MLP."""

    limits: ClassVar[Mapping[str, tuple[int, int]]] = {**DeltaNetFamily.limits, "num_experts": (0, 2**14)}
    experts = ExpertsConfig(shared=SharedConfig(gate="shared_expert_gate"))

    num_key_value_heads: int | None = 2
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    experts_per_token: int = field(default=10, name="num_experts_per_tok")
    norm_topk_prob: bool = True

    def sized_experts(self) -> ExpertsConfig | None:
        return super().sized_experts() if self.num_experts else None


PLUGIN = Qwen3NextFamily
