"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer; experts, and one that all tokens share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from aioengine.families._config import check_experts, decode_config
from aioengine.families._delta_nets import DeltaNetFamily
from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig, dense_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(DeltaNetFamily, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 2
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    experts_per_token: int = field(default=10, name="num_experts_per_tok")
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts:
            check_experts(self.num_experts, self.experts_per_token, self.decoder_sparse_step)

    @property
    def experts(self) -> ExpertsConfig | None:
        """None: there are none."""
        if not self.num_experts:
            return None
        return ExpertsConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            inner_size=self.moe_intermediate_size,
            router=RouterConfig(is_normalized=self.norm_topk_prob),
            shared=SharedConfig(inner_size=self.shared_expert_intermediate_size, gate="shared_expert_gate"),
            dense_layers=dense_layers(self.num_hidden_layers, self.decoder_sparse_step, self.mlp_only_layers or ()),
        )


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return replace(found.hybrid(config, is_grouped=True), experts=found.experts)


PLUGIN = read
