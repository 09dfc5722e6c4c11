"""DeepSeek-V3, DeepSeek-R1, Moonlight: experts by score and bias, of the groups whose best two have the highest sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import field

from aioengine.families._config import decode_config, not_implemented
from aioengine.families._deepseek import DeepseekFamily
from aioengine.families._experts import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(DeepseekFamily, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    first_k_dense_replace: int = 3
    num_experts: int = field(default=256, name="n_routed_experts")
    num_shared_experts: int | None = field(default=1, name="n_shared_experts")
    moe_intermediate_size: int = 2048
    experts_per_token: int = field(default=8, name="num_experts_per_tok")
    num_groups: int | None = field(default=8, name="n_group")
    topk_group: int | None = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    num_mtp_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        num_groups, _ = self.groups
        if num_groups > 1 and self.num_experts < 2 * num_groups:
            not_implemented("n_group", num_groups, f"at most {self.num_experts // 2}, with two experts a group")


def read(config: Mapping[str, object]) -> DecoderConfig:
    return deepseek_v3_decoder(decode_config(config, Config), config)


def deepseek_v3_decoder(found: Config, config: Mapping[str, object]) -> DecoderConfig:
    """The decoder of ``config``, whose fields ``found`` has."""
    num_groups, top_groups = found.groups
    router = RouterConfig(
        has_choice_bias=True,
        is_wide=True,
        scoring="sigmoid",
        is_normalized=found.norm_topk_prob,
        scale=found.routed_scaling_factor,
        num_groups=num_groups,
        top_groups=top_groups,
        group_top=2,
    )
    return found.expert_decoder(config, router)


PLUGIN = read
