"""Mistral: Llama without biases, and a sliding window in all layers or in none."""

from __future__ import annotations

from msgspec import field

from aioengine.families._block_config import BlockConfig
from aioengine.families._config import DecoderFamily
from aioengine.families._experts import ExpertsConfig


class MistralFamily(DecoderFamily, frozen=True, kw_only=True):
    has_one_window = True

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096


class MinistralFamily(MistralFamily, frozen=True, kw_only=True):
    """Ministral: Mistral with a sliding window in some layers."""

    has_one_window = False


class MixtralFamily(MistralFamily, frozen=True, kw_only=True):
    """Mixtral: Mistral with experts in all layers. ``router_jitter_noise`` affects training only."""

    default_theta = 1e6
    block = BlockConfig(mlp="block_sparse_moe.")
    experts = ExpertsConfig(names=("w1", "w3", "w2"))

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts: int = field(default=8, name="num_local_experts")
    experts_per_token: int = field(default=2, name="num_experts_per_tok")


PLUGIN = MistralFamily
