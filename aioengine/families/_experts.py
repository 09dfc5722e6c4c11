"""Configs of mixtures of experts. Torch-free.

D hidden size, F inner size of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._fields import not_implemented

MXFP4_BLOCK = 32
"""MXFP4 values per scale, stored in 16 bytes."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The router, which selects the experts of each token.

    Attributes:
        name: of the linear layer that computes the logits.
        has_bias: the linear layer has a bias.
        has_choice_bias: a bias is added to the scores when experts are selected, but not to their weights.
        in_fp32: the logits are computed in fp32.
        scoring: "softmax" over all experts, or "sigmoid" of each logit.
        is_normalized: divide the weights of a token by their sum.
        scale: factor of all weights.
        num_groups: number of equal groups of experts; 1: no groups.
        top_groups: number of groups from which the experts of a token are chosen.
        group_top: the score of a group is the sum of its ``group_top`` best scores.
    """

    name: str = "gate"
    has_bias: bool = False
    has_choice_bias: bool = False
    in_fp32: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A shared expert, which processes all tokens.

    Attributes:
        inner_size: F.
        gate: name of the layer that computes a factor per token; "" if there is none.
    """

    inner_size: int = 0
    name: str = "shared_expert"
    gate: str = ""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a block. A family sets it without sizes, see ``sized``.

    Attributes:
        top_k: number of experts per token.
        inner_size: F.
        stored: layout in the checkpoint. "separate": gate, up and down matrices of each expert. "packed": gate_up
            [E, 2 F, D] with gates first, and down [E, D, F]. "interleaved": gate_up [E, D, 2 F] with gate and up rows
            alternating, down [E, F, D], and biases. "mxfp4": MXFP4 blocks of gate_up [E, 2 F, D] with gate and up
            rows alternating and of down [E, D, F], and biases.
        names: of the gate, up and down tensors ("separate"), or of the gate_up and down tensors.
        limit, alpha: see ``kernels.expert_types.GateFunction``.
        shared: the shared expert; None if there is none.
        dense_layers: indices of layers with an MLP instead of experts.
    """

    num_experts: int = 0
    top_k: int = 0
    inner_size: int = 0
    router: RouterConfig = RouterConfig()
    stored: Literal["separate", "packed", "interleaved", "mxfp4"] = "separate"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    limit: float = 0.0
    alpha: float = 1.0
    shared: SharedConfig | None = None
    dense_layers: frozenset[int] = frozenset()

    def sized(self, fields: Mapping[str, Any]) -> ExpertsConfig:
        """Add the sizes of config.json. ``fields``: of the family."""
        sparse_step, mlp_only = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
        if sparse_step < 1:
            not_implemented("decoder_sparse_step", sparse_step, "at least 1")
        layers = range(fields["num_hidden_layers"])
        router, shared = self.router, self.shared
        if shared is not None and "shared_expert_intermediate_size" in fields:
            shared = replace(shared, inner_size=fields["shared_expert_intermediate_size"])
        return replace(
            self,
            num_experts=fields["num_experts"],
            top_k=fields["experts_per_token"],
            inner_size=fields.get("moe_intermediate_size", fields["intermediate_size"]),
            router=replace(router, is_normalized=bool(fields.get("norm_topk_prob", router.is_normalized))),
            shared=shared,
            dense_layers=frozenset(layer for layer in layers if layer in mlp_only or (layer + 1) % sparse_step),
        )

    def check(self) -> None:
        """Raise ValueError if the router cannot choose ``top_k`` experts."""
        num_experts, num_groups, top_groups = self.num_experts, self.router.num_groups, self.router.top_groups
        if not 1 <= self.top_k <= num_experts:
            not_implemented("num_experts_per_tok", self.top_k, f"1 to {num_experts}, the number of experts")
        if num_experts % num_groups:
            not_implemented("n_group", num_groups, f"a divisor of the number of experts ({num_experts})")
        if num_experts // num_groups < self.router.group_top:
            limit = f"at most {num_experts // self.router.group_top}, with {self.router.group_top} experts per group"
            not_implemented("n_group", num_groups, limit)
        minimum = -(-self.top_k * num_groups // num_experts)
        if not minimum <= top_groups <= num_groups:
            not_implemented("topk_group", top_groups, f"{minimum} to {num_groups} of the {num_groups} groups")


CHOICE_BIAS = "e_score_correction_bias"
"""Name of the bias for the selection of experts, within the router."""
