"""Qwen3-MoE: attention as Qwen3 has it, with one sliding window for all layers or none, and experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import field
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import FamilyConfig, check_experts, decode_config
from aioengine.families._experts import ExpertsConfig, RouterConfig, dense_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    """``num_local_experts``: the name that newer versions of transformers write for ``num_experts``."""

    has_one_window: ClassVar[bool] = True

    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
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

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    experts = ExpertsConfig(
        num_experts=found.all_experts,
        top_k=found.experts_per_token,
        inner_size=found.moe_intermediate_size,
        router=RouterConfig(is_normalized=found.norm_topk_prob),
        dense_layers=dense_layers(found.num_hidden_layers, found.decoder_sparse_step, found.mlp_only_layers or ()),
    )
    bias = found.attention_bias
    attention = AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm())
    return replace(found.decoder(found.rope(config)), experts=experts, attention=attention)


PLUGIN = read
