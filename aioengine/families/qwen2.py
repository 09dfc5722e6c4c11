"""Qwen2: biases on queries, keys and values, and an optional sliding window in the upper layers."""

from __future__ import annotations

from msgspec import field

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import WindowFamily
from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig, dense_layers


class Qwen2Family(WindowFamily, frozen=True, kw_only=True):
    attention = AttentionConfig(qkv_bias=True)

    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False
    max_window_layers: int = 28

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def has_window(self, layer: int) -> bool:
        return layer >= self.max_window_layers


class Qwen2MoeFamily(Qwen2Family, frozen=True, kw_only=True):
    """Qwen2-MoE: Qwen2 with experts in some or all layers, and a shared expert."""

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

    @property
    def experts(self) -> ExpertsConfig:
        return ExpertsConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            inner_size=self.moe_intermediate_size,
            router=RouterConfig(is_normalized=self.norm_topk_prob),
            shared=SharedConfig(inner_size=self.shared_expert_intermediate_size, gate="shared_expert_gate"),
            dense_layers=dense_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers or ()),
        )


PLUGIN = Qwen2Family
