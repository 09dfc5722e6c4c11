"""DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash: latent attention, and experts in all layers except the first ones."""

from __future__ import annotations

from typing import Literal

from msgspec import field
from msgspec.structs import replace

from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig
from aioengine.families._fields import not_implemented
from aioengine.families._latent import LatentFamily


class DeepseekFamily(LatentFamily, frozen=True, kw_only=True):
    """The fields that DeepSeek-V2 and DeepSeek-V3 share.

    Attributes:
        num_shared_experts: number of shared experts, which form one MLP.
        num_nextn_predict_layers, num_mtp_layers: layers for multi-token prediction in the checkpoint. They follow the
            last layer and are not used. The first field takes precedence.
    """

    experts = ExpertsConfig(router=RouterConfig(in_fp32=True))
    limits = dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "num_shared_experts"), (0, 2**14))

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

    @property
    def groups(self) -> tuple[int, int]:
        """The number of expert groups, and the number of groups that the experts of a token come from."""
        num_groups = self.num_groups or 1
        return num_groups, num_groups if self.topk_group is None else self.topk_group

    @property
    def dense_layers(self) -> frozenset[int]:
        """The layers with an MLP instead of experts."""
        return frozenset(range(min(self.first_k_dense_replace, self.num_hidden_layers)))

    @property
    def ignored(self) -> tuple[str, ...]:
        """The layers for multi-token prediction."""
        num_extra = self.num_mtp_layers if self.num_nextn_predict_layers is None else self.num_nextn_predict_layers
        return tuple(f"model.layers.{self.num_hidden_layers + extra}." for extra in range(num_extra))

    def sized_experts(self) -> ExpertsConfig:
        experts, (num_groups, top_groups) = super().sized_experts(), self.groups
        assert experts is not None, "this family has experts"
        scale, shared_size = self.routed_scaling_factor, self.moe_intermediate_size * (self.num_shared_experts or 0)
        return replace(
            experts,
            router=replace(experts.router, scale=scale, num_groups=num_groups, top_groups=top_groups),
            shared=SharedConfig(inner_size=shared_size, name="shared_experts") if shared_size else None,
            dense_layers=self.dense_layers,
        )


class DeepseekV2Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V2, DeepSeek-V2-Lite: a token uses the best experts overall, or of the groups with the best expert."""

    rope_interleave: Literal[True] = True
    mlp_bias: Literal[False] = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    norm_topk_prob: Literal[False] | None = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topk_method == "group_limited_greedy" and None in (self.num_groups, self.topk_group):
            not_implemented(
                "n_group", self.num_groups, "numbers for n_group and topk_group with topk_method 'group_limited_greedy'"
            )

    @property
    def groups(self) -> tuple[int, int]:
        return super().groups if self.topk_method == "group_limited_greedy" else (1, 1)


class DeepseekV3Family(DeepseekFamily, frozen=True, kw_only=True):
    """DeepSeek-V3, R1, Moonlight: score and bias select experts, from the groups with the best sum of two experts."""

    experts = ExpertsConfig(router=RouterConfig(in_fp32=True, has_choice_bias=True, scoring="sigmoid", group_top=2))

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


class Glm4MoeLiteFamily(DeepseekV3Family, frozen=True, kw_only=True):
    """GLM-4.7-Flash: DeepSeek-V3 with a list of layers with experts."""

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
        self.check_length("mlp_layer_types", self.mlp_layer_types)

    @property
    def dense_layers(self) -> frozenset[int]:
        if self.mlp_layer_types is None:
            return super().dense_layers
        return frozenset(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "dense")
