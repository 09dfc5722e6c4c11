"""Qwen3: Qwen2 with query and key norms."""

from __future__ import annotations

from typing import ClassVar

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import DecoderConfig, check_experts
from aioengine.families._experts import ExpertsConfig, RouterConfig, dense_layers
from aioengine.families.qwen2 import Qwen2Family


class Qwen3Family(Qwen2Family, frozen=True, kw_only=True):
    head_dim: int | None = 128
    attention_bias: bool = False

    def decoder(self) -> DecoderConfig:
        bias = self.attention_bias
        attention = AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm())
        return replace(super().decoder(), attention=attention)


class Qwen3MoeFamily(Qwen3Family, frozen=True, kw_only=True):
    """Qwen3-MoE: Qwen3 with experts, and a sliding window in all layers or in none.

    ``num_local_experts`` is the name of ``num_experts`` in files of newer versions of transformers.
    """

    has_one_window: ClassVar[bool] = True

    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 768
    num_experts: int | None = None
    num_local_experts: int = 128
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.all_experts, self.experts_per_token, self.decoder_sparse_step)

    @property
    def all_experts(self) -> int:
        return self.num_local_experts if self.num_experts is None else self.num_experts

    def has_window(self, layer: int) -> bool:
        return True

    def decoder(self) -> DecoderConfig:
        experts = ExpertsConfig(
            num_experts=self.all_experts,
            top_k=self.experts_per_token,
            inner_size=self.moe_intermediate_size,
            router=RouterConfig(is_normalized=self.norm_topk_prob),
            dense_layers=dense_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers or ()),
        )
        return replace(super().decoder(), experts=experts)


PLUGIN = Qwen3Family
