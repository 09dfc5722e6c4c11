"""Qwen3: Qwen2 with query and key norms."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import DecoderConfig
from aioengine.families._experts import ExpertsConfig
from aioengine.families.qwen2 import Qwen2Family


class Qwen3Family(Qwen2Family, frozen=True, kw_only=True):
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


PLUGIN = Qwen3Family
