"""Qwen2-MoE: attention as Qwen2 has it, experts in some layers or in all, and one that all tokens share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from aioengine.families import qwen2
from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import check_experts, decode_config
from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig, dense_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(qwen2.Config, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 16
    qkv_bias: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.experts_per_token, self.decoder_sparse_step)

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.window is None or self.layer_types is not None:
            return super().windows
        layers = range(self.num_hidden_layers)
        return tuple(None if layer % 2 or layer >= self.max_window_layers else self.window for layer in layers)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    experts = ExpertsConfig(
        num_experts=found.num_experts,
        top_k=found.experts_per_token,
        inner_size=found.moe_intermediate_size,
        router=RouterConfig(is_normalized=found.norm_topk_prob),
        shared=SharedConfig(inner_size=found.shared_expert_intermediate_size, gate="shared_expert_gate"),
        dense_layers=dense_layers(found.num_hidden_layers, found.decoder_sparse_step, found.mlp_only_layers or ()),
    )
    attention = AttentionConfig(qkv_bias=found.qkv_bias)
    return replace(found.decoder(found.rope(config)), experts=experts, attention=attention)


PLUGIN = read
