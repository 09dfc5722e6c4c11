"""Qwen2: biases on queries, keys and values, and an optional sliding window in the upper layers."""

from __future__ import annotations

from msgspec import field

from aioengine.families._config import DecoderFamily
from aioengine.families._experts import ExpertsConfig, SharedConfig


class Qwen2Family(DecoderFamily, frozen=True, kw_only=True):
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


PLUGIN = Qwen2Family
