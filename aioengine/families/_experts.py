"""Mixtures of experts, as config.json describes them, and the names and shapes of their tensors. No torch.

D model size, I inner size of an expert, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

Shapes = dict[str, tuple[int, ...]]
"""Names of tensors and their shapes."""

MXFP4_BLOCK = 32
"""Numbers with one scale, in 16 bytes."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The router, which chooses the experts of a token.

    Attributes:
        has_bias: whether a bias is added to the logits.
        has_choice_bias: whether there is a bias that is added to the scores to choose experts, and not to weight them.
        is_wide: whether the logits are computed in fp32.
        scoring, is_normalized, scale, num_groups, top_groups, group_top: as in ``kernels.expert_types.Routing``.
    """

    name: str = "gate"
    has_bias: bool = False
    has_choice_bias: bool = False
    is_wide: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An expert that all tokens go through.

    Attributes:
        inner_size: I.
        gate: the name of the layer that computes a factor for each token; empty: there is none.
    """

    inner_size: int
    name: str = "shared_expert"
    gate: str = ""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a block.

    Attributes:
        top_k: experts of a token.
        inner_size: I.
        stored: how a checkpoint stores experts. "separate": matrices of each expert, gates and ups apart. "packed":
            [E, 2 I, D], gates first, and [E, D, I]. "interleaved": [E, D, 2 I], gates and ups in turn, and [E, I, D],
            with biases. "mxfp4": blocks of [E, 2 I, D], gates and ups in turn, and of [E, D, I], with biases.
        names: of the tensors of gates, ups and downs ("separate"), or of gates with ups and of downs.
        limit, alpha: as in ``kernels.expert_types.GateFunction``.
        shared: None: there is none.
        dense_layers: the layers that have an ordinary MLP in the place of experts.
    """

    num_experts: int
    top_k: int
    inner_size: int
    router: RouterConfig = RouterConfig()
    stored: Literal["separate", "packed", "interleaved", "mxfp4"] = "separate"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    limit: float = 0.0
    alpha: float = 1.0
    shared: SharedConfig | None = None
    dense_layers: frozenset[int] = frozenset()


CHOICE_BIAS = "e_score_correction_bias"
"""The name of the bias to choose experts by, behind that of the router."""


def tensors_of_experts(config: ExpertsConfig, hidden_size: int) -> Shapes:
    """Name -> shape of the tensors of one block, without what the names of its MLP begin with."""
    num_experts, router = config.num_experts, config.router
    found: Shapes = {f"{router.name}.weight": (num_experts, hidden_size)}
    if router.has_bias:
        found |= {f"{router.name}.bias": (num_experts,)}
    if router.has_choice_bias:
        found |= {f"{router.name}.{CHOICE_BIAS}": (num_experts,)}
    if (shared := config.shared) is not None:
        inner = shared.inner_size
        found |= {f"{shared.name}.{name}.weight": (inner, hidden_size) for name in ("gate_proj", "up_proj")}
        found |= {f"{shared.name}.down_proj.weight": (hidden_size, inner)}
        found |= {f"{shared.gate}.weight": (1, hidden_size)} if shared.gate else {}
    return found | _experts(config, hidden_size)


def _experts(config: ExpertsConfig, hidden_size: int) -> Shapes:
    num_experts, inner = config.num_experts, config.inner_size
    if config.stored == "separate":
        gate, up, down = config.names
        shapes = {gate: (inner, hidden_size), up: (inner, hidden_size), down: (hidden_size, inner)}
        experts = range(num_experts)
        return {f"experts.{expert}.{name}.weight": shape for expert in experts for name, shape in shapes.items()}
    gate_up, down = config.names
    if config.stored == "packed":
        return {gate_up: (num_experts, 2 * inner, hidden_size), down: (num_experts, hidden_size, inner)}
    biases: Shapes = {f"{gate_up}_bias": (num_experts, 2 * inner), f"{down}_bias": (num_experts, hidden_size)}
    if config.stored == "interleaved":
        return {gate_up: (num_experts, hidden_size, 2 * inner), down: (num_experts, inner, hidden_size), **biases}
    return biases | {name: shape for name, (shape, _) in quantized_tensors(config, hidden_size).items()}


def quantized_tensors(config: ExpertsConfig, hidden_size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> shape, and type as safetensors names it, of the tensors of a block that are no floats."""
    if config.stored != "mxfp4":
        return {}
    gate_up, down = config.names
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, rows, columns in (
        (gate_up, 2 * config.inner_size, hidden_size),
        (down, hidden_size, config.inner_size),
    ):
        scales = config.num_experts, rows, columns // MXFP4_BLOCK
        found[f"{name}_blocks"] = (*scales, MXFP4_BLOCK // 2), "U8"
        found[f"{name}_scales"] = scales, "U8"
    return found


def dense_layers(num_layers: int, sparse_step: int, mlp_only: Collection[int]) -> frozenset[int]:
    """The layers without experts, where every ``sparse_step``-th layer has some, but for those of ``mlp_only``."""
    return frozenset(layer for layer in range(num_layers) if layer in mlp_only or (layer + 1) % sparse_step)
