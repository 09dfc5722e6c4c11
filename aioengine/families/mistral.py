"""Mistral: Llama without biases, and a sliding window in all layers or in none."""

from __future__ import annotations

from msgspec import field

from aioengine.families._block_config import BlockConfig
from aioengine.families._config import WindowFamily
from aioengine.families._experts import ExpertsConfig


class MistralFamily(WindowFamily, frozen=True, kw_only=True):
    has_one_window = True

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072


class MinistralFamily(MistralFamily, frozen=True, kw_only=True):
    """Ministral: Mistral with a sliding window in some layers."""

    has_one_window = False


class MixtralFamily(MistralFamily, frozen=True, kw_only=True):
    """Mixtral: Mistral with experts in all layers. ``router_jitter_noise`` affects training only."""

    default_theta = 1e6
    block = BlockConfig(mlp="block_sparse_moe.")

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    experts_per_token: int = field(default=2, name="num_experts_per_tok")

    @property
    def experts(self) -> ExpertsConfig:
        return ExpertsConfig(
            num_experts=self.num_local_experts,
            top_k=self.experts_per_token,
            inner_size=self.intermediate_size,
            names=("w1", "w3", "w2"),
        )


PLUGIN = MistralFamily
