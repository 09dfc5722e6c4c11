"""DeepSeek-V2 and DeepSeek-V2-Lite: the best experts of all, or of the groups with the best expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from aioengine.families._config import decode_config, not_implemented
from aioengine.families._deepseek import DeepseekFamily
from aioengine.families._experts import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(DeepseekFamily, frozen=True, kw_only=True):
    rope_interleave: Literal[True] = True
    mlp_bias: Literal[False] = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    norm_topk_prob: Literal[False] | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk_method == "group_limited_greedy" and None in (self.num_groups, self.topk_group):
            not_implemented(
                "n_group", self.num_groups, "numbers for n_group and topk_group with 'group_limited_greedy'"
            )

    @property
    def groups(self) -> tuple[int, int]:
        return super().groups if self.topk_method == "group_limited_greedy" else (1, 1)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    num_groups, top_groups = found.groups
    router = RouterConfig(
        is_wide=True,
        is_normalized=False,
        scale=found.routed_scaling_factor,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    return found.expert_decoder(config, router)


PLUGIN = read
