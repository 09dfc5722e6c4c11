"""DeepSeek-V2, DeepSeek-V3 and the like: latent attention, and experts in all layers but the first ones. No torch."""

from __future__ import annotations

from typing import Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._config import DecoderConfig, check_experts
from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig
from aioengine.families._fields import not_implemented
from aioengine.families._latent import LatentFamily


class DeepseekFamily(LatentFamily, frozen=True, kw_only=True):
    """``num_shared_experts``: experts that all tokens go through, which are one MLP that is as large as all of them.

    ``num_nextn_predict_layers``, or ``num_mtp_layers``: layers behind the last one that predict further tokens, which
    checkpoints may have and which are not used.
    """

    first_k_dense_replace: int = 0
    num_experts: int = field(default=64, name="n_routed_experts")
    num_shared_experts: int | None = field(default=2, name="n_shared_experts")
    moe_intermediate_size: int = 1407
    experts_per_token: int = field(name="num_experts_per_tok")
    num_groups: int | None = field(default=None, name="n_group")
    topk_group: int | None = None
    norm_topk_prob: bool | None = False
    routed_scaling_factor: float = 1.0
    moe_layer_freq: Literal[1] = 1
    num_nextn_predict_layers: int | None = None
    num_mtp_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.experts_per_token, name="n_routed_experts")
        num_groups, top_groups = self.groups
        if self.num_experts % num_groups:
            not_implemented("n_group", num_groups, f"a divisor of {self.num_experts}, the number of experts")
        fewest = -(-self.experts_per_token * num_groups // self.num_experts)
        if not fewest <= top_groups <= num_groups:
            not_implemented("topk_group", top_groups, f"{fewest} to {num_groups}, of the groups of experts")

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them the experts of a token are chosen from."""
        num_groups = self.num_groups or 1
        return num_groups, num_groups if self.topk_group is None else self.topk_group

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers that have an MLP and no experts."""
        return frozenset(range(min(self.first_k_dense_replace, self.num_hidden_layers)))

    @property
    def router(self) -> RouterConfig:
        num_groups, top_groups = self.groups
        return RouterConfig(
            is_wide=True,
            is_normalized=bool(self.norm_topk_prob),
            scale=self.routed_scaling_factor,
            num_groups=num_groups,
            top_groups=top_groups,
        )

    def decoder(self) -> DecoderConfig:
        shared: SharedConfig | None = None
        if self.num_shared_experts:
            inner_size = self.moe_intermediate_size * self.num_shared_experts
            shared = SharedConfig(inner_size=inner_size, name="shared_experts")
        experts = ExpertsConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            inner_size=self.moe_intermediate_size,
            router=self.router,
            shared=shared,
            dense_layers=self.dense_layers,
        )
        num_more = self.num_mtp_layers if self.num_nextn_predict_layers is None else self.num_nextn_predict_layers
        more_layers = range(self.num_hidden_layers, self.num_hidden_layers + num_more)
        return replace(
            super().decoder(), experts=experts, ignored=tuple(f"model.layers.{layer}." for layer in more_layers)
        )


class DeepseekV2Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V2 and DeepSeek-V2-Lite: the best experts of all, or of the groups with the best expert."""

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


class DeepseekV3Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V3, R1, Moonlight: experts by score and bias, of the groups whose best two have the highest sum."""

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

    @property
    def router(self) -> RouterConfig:
        return replace(super().router, has_choice_bias=True, scoring="sigmoid", group_top=2)


class Glm4MoeLiteFamily(DeepseekV3Family, frozen=True, kw_only=True):
    """GLM-4.7-Flash: as DeepSeek-V3, with a list of the layers that have experts."""

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
