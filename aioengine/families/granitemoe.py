"""GraniteMoE: a Granite with experts in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import replace

from aioengine.families import granite
from aioengine.families._block_config import BlockConfig
from aioengine.families._config import check_experts, decode_config
from aioengine.families._experts import ExpertsConfig, RouterConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(granite.Config, frozen=True, kw_only=True):
    num_local_experts: int = 8
    experts_per_token: int = field(default=2, name="num_experts_per_tok")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.experts_per_token, name="num_local_experts")


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    experts = ExpertsConfig(
        num_experts=found.num_local_experts,
        top_k=found.experts_per_token,
        inner_size=found.intermediate_size,
        router=RouterConfig(name="router.layer"),
        stored="packed",
        names=("input_linear.weight", "output_linear.weight"),
    )
    return replace(granite.granite_decoder(found, config), experts=experts, block=BlockConfig(mlp="block_sparse_moe."))


PLUGIN = read
