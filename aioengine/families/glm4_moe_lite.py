"""GLM-4.7-Flash: as DeepSeek-V3, with a list of the layers that have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import field

from aioengine.families import deepseek_v3
from aioengine.families._config import decode_config, not_implemented

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(deepseek_v3.Config, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 20
    max_position_embeddings: int = 202_752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    first_k_dense_replace: Literal[1] = 1
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    num_experts: int = field(default=64, name="n_routed_experts")
    moe_intermediate_size: int = 1536
    experts_per_token: int = field(default=4, name="num_experts_per_tok")
    num_groups: int | None = field(default=1, name="n_group")
    topk_group: int | None = 1
    routed_scaling_factor: float = 1.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_layer_types is not None and len(self.mlp_layer_types) != self.num_hidden_layers:
            of = f"of {len(self.mlp_layer_types)} layers"
            not_implemented("mlp_layer_types", of, f"one for each of the {self.num_hidden_layers} layers")

    @property
    def dense_layers(self) -> frozenset[int]:
        if self.mlp_layer_types is None:
            return super().dense_layers
        return frozenset(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "dense")


def read(config: Mapping[str, object]) -> DecoderConfig:
    return deepseek_v3.deepseek_v3_decoder(decode_config(config, Config), config)


PLUGIN = read
