"""Mixtral: attention as Mistral has it, and experts in all layers.

Noise on the router's inputs (``router_jitter_noise``) is a matter of training alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec import field
from msgspec.structs import replace

from aioengine.families import mistral
from aioengine.families._block_config import BlockConfig
from aioengine.families._config import check_experts, decode_config
from aioengine.families._experts import ExpertsConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(mistral.Config, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 1e6

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
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
        names=("w1", "w3", "w2"),
    )
    decoder = found.decoder(found.rope(config))
    return replace(decoder, experts=experts, block=BlockConfig(mlp="block_sparse_moe."))


PLUGIN = read
