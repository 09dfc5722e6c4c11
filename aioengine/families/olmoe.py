"""OLMoE: norms over all heads of queries and of keys together, and experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import FamilyConfig, check_experts, decode_config, not_implemented
from aioengine.families._experts import ExpertsConfig, RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.experts_per_token)
        if self.clip_qkv is not None:
            not_implemented("clip_qkv", self.clip_qkv, "null")


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    experts = ExpertsConfig(
        num_experts=found.num_experts,
        top_k=found.experts_per_token,
        inner_size=found.intermediate_size,
        router=RouterConfig(is_normalized=found.norm_topk_prob),
    )
    bias = found.attention_bias
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm(extent="all_heads"))
    return replace(found.decoder(found.rope(config)), experts=experts, attention=attention)


PLUGIN = read
