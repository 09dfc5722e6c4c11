"""Qwen2, Qwen3, Qwen3-Next and the text model of Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, DeltaNetConfig, HeadNorm, NormConfig
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._experts import ExpertsConfig, SharedConfig
from aioengine.families._fields import not_implemented


class Qwen2Family(DecoderFamily, frozen=True, kw_only=True):
    """Qwen2: biases on queries, keys and values, and an optional sliding window in the upper layers."""

    qkv_bias = True

    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def has_window(self, layer: int) -> bool:
        return layer >= self.max_window_layers


class Qwen2MoeFamily(Qwen2Family, frozen=True, kw_only=True):
    """Qwen2-MoE: Qwen2 with experts in some or all layers, and a shared expert."""

    experts = ExpertsConfig(shared=SharedConfig(gate="shared_expert_gate"))

    num_key_value_heads: int | None = 16
    qkv_bias: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    norm_topk_prob: bool = False

    def has_window(self, layer: int) -> bool:
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen3Family(Qwen2Family, frozen=True, kw_only=True):
    """Qwen3: Qwen2 with query and key norms."""

    attention = AttentionConfig(head_norm=HeadNorm())
    qkv_bias = False

    head_dim: int | None = 128
    attention_bias: bool = False


class Qwen3MoeFamily(Qwen3Family, frozen=True, kw_only=True):
    """Qwen3-MoE: Qwen3 with experts, and a sliding window in all layers or in none."""

    has_one_window = True
    experts = ExpertsConfig()

    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    norm_topk_prob: bool = False

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. Newer versions of transformers write ``num_local_experts`` instead of ``num_experts``."""
        num_experts = config.get("num_experts")
        if num_experts is None:
            num_experts = config.get("num_local_experts", 128)
        return super().read({**config, "num_experts": num_experts})


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


class Qwen35TextFamily(DeltaNetFamily, frozen=True, kw_only=True):
    """Qwen3.5, text only: gated delta nets, and gated attention in every fourth layer."""

    is_grouped: ClassVar[bool] = False

    num_key_value_heads: int | None = 4

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        # the three axes of a position are equal for text
        return replace(decoder, rope=replace(decoder.rope, mrope_section=(), mrope_interleaved=False))


PLUGIN = Qwen2Family
