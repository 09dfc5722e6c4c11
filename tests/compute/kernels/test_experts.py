"""Mixture of experts: routing, experts on a CPU, GPU kernels in Triton's interpreter, checkpoint layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen2MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from aioengine.families._experts import ExpertsConfig, RouterConfig, SharedConfig
from aioengine.families._tensors import expert_tensors as described_tensors
from aioengine.kernels import experts, mxfp4, routing
from aioengine.kernels.codes import Codes
from aioengine.kernels.expert_types import SILU, ChosenExperts, ExpertWeights, GateFunction, SharedOutputs
from aioengine.layers import expert_tensors
from aioengine.layers.experts import SparseMLP
from aioengine.layers.layer import Placement
from aioengine.quantization.plain import plain
from tests.compute.interpreted import run_compiled, run_interpreted

NUM_EXPERTS, SIZE, INNER = 6, 32, 24
PLACEMENT = Placement(dtype=torch.float32, device=torch.device("cpu"), format_of=plain)
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 12,
    "hidden_size": SIZE,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
}
OTHERS: dict[str, Any] = {"hidden_size": SIZE, "num_experts_per_tok": 3}
ROUTERS = {
    "mixtral": (MixtralTopKRouter(MixtralConfig(num_local_experts=12, **OTHERS)), (3, RouterConfig())),
    "qwen2_moe": (
        Qwen2MoeTopKRouter(Qwen2MoeConfig(num_experts=12, norm_topk_prob=False, **OTHERS)),
        (3, RouterConfig(is_normalized=False)),
    ),
    "qwen3_moe": (
        Qwen2MoeTopKRouter(Qwen2MoeConfig(num_experts=12, norm_topk_prob=True, **OTHERS)),
        (3, RouterConfig()),
    ),
    "gpt_oss": (GptOssTopKRouter(GptOssConfig(num_local_experts=12, **OTHERS)), (3, RouterConfig())),
    "deepseek_v2": (
        DeepseekV2TopkRouter(DeepseekV2Config(topk_method="greedy", **DEEPSEEK)),
        (4, RouterConfig(is_normalized=False, scale=2.5)),
    ),
    "deepseek_v2 groups": (
        DeepseekV2TopkRouter(DeepseekV2Config(topk_method="group_limited_greedy", n_group=4, topk_group=2, **DEEPSEEK)),
        (4, RouterConfig(is_normalized=False, scale=2.5, num_groups=4, top_groups=2)),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter(DeepseekV3Config(n_group=4, topk_group=2, norm_topk_prob=True, **DEEPSEEK)),
        (4, RouterConfig(scoring="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_top=2)),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_matches_transformers(name: str) -> None:
    router, own = ROUTERS[name]
    torch.manual_seed(0)
    for tensor in router.state_dict().values():
        tensor.copy_(torch.randn_like(tensor) * 0.3)
    x = torch.randn(40, SIZE)
    logits, expected_weights, expected = router(x)
    weights_of = torch.zeros(40, 12).scatter_(1, expected, expected_weights.float())
    bias = router.state_dict().get("e_score_correction_bias")
    chosen, weights = routing.route(logits, bias, *own)
    torch.testing.assert_close(torch.zeros(40, 12).scatter_(1, chosen.long(), weights), weights_of)


def test_ties_go_to_the_expert_with_the_lower_index() -> None:
    logits = torch.zeros(2, 8)
    logits[1, [2, 5]] = 1.0
    assert routing.route(logits, None, 3, RouterConfig()).experts.tolist() == [[0, 1, 2], [2, 5, 0]]


def random_weights(gate: GateFunction, *, has_bias: bool, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    torch.manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, SIZE, dtype=dtype) * 0.3
    down = torch.randn(NUM_EXPERTS, SIZE, INNER, dtype=dtype) * 0.3
    biases = (torch.randn(NUM_EXPERTS, 2 * INNER), torch.randn(NUM_EXPERTS, SIZE)) if has_bias else (None, None)
    return ExpertWeights(gate_up, down, *(None if bias is None else bias.to(dtype) for bias in biases), gate=gate)


def reference(
    x: torch.Tensor, chosen: ChosenExperts, weights: ExpertWeights, shared: SharedOutputs | None = None
) -> torch.Tensor:
    """Compute the experts, x [T, D] -> [T, D], with a copy of the weights of an expert for each token that uses it."""
    indices = chosen.experts.long()
    gate_up = torch.einsum("td,tkid->tki", x, weights.gate_up[indices])
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[indices]
    parts = torch.einsum("tki,tkdi->tkd", experts.activate(gate_up, weights.gate), weights.down[indices])
    if weights.down_bias is not None:
        parts = parts + weights.down_bias[indices]
    return experts.add_shared((parts * chosen.weights.unsqueeze(-1)).sum(1).to(x.dtype), shared)


@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
@pytest.mark.parametrize(("gate", "has_bias"), [(SILU, False), (GateFunction(0.7, 1.702), True)])
def test_experts_match_the_reference(gate: GateFunction, has_bias: bool, shared: str) -> None:
    weights = random_weights(gate, has_bias=has_bias)
    computed = experts.prepare(weights, torch.float32)
    for num_tokens in (1, 2, 40):
        x = torch.randn(num_tokens, SIZE)
        chosen = routing.route(torch.randn(num_tokens, NUM_EXPERTS), None, 3, RouterConfig())
        gates = torch.randn(num_tokens, 1) if shared == "gated" else None
        more = None if shared == "none" else SharedOutputs(torch.randn(num_tokens, SIZE), gates)
        expected = reference(x, chosen, weights, more)
        torch.testing.assert_close(computed(x, chosen, more), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    own = (3, RouterConfig(scoring="sigmoid"))
    x, logits = torch.randn(151, SIZE, dtype=dtype), torch.randn(151, NUM_EXPERTS, dtype=dtype)
    values, gates = torch.randn(151, SIZE, dtype=dtype), torch.randn(151, 1, dtype=dtype)
    for gate, has_bias in ((SILU, False), (GateFunction(0.7, 1.702), True)):
        computed = experts.prepare(random_weights(gate, has_bias=has_bias, dtype=dtype), dtype)
        whole = computed(x, routing.route(logits, None, *own), SharedOutputs(values, gates))
        for rows in (slice(0, 1), slice(7, 9), slice(20, 37), slice(3, 120)):
            shared = SharedOutputs(values[rows], gates[rows])
            part = computed(x[rows], routing.route(logits[rows], None, *own), shared)
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_weights_match_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 129, (3, 8, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for own_blocks, own_scales, own in zip(blocks, scales, expected, strict=True):
        codes = mxfp4.to_codes(own_blocks, own_scales)
        assert torch.equal(codes.dequantized(dtype).t(), own)
        assert torch.equal(mxfp4.to_blocks(codes), own_blocks)
        assert torch.equal(mxfp4.encode(own.t().contiguous(), own_scales), own_blocks)


def test_large_mxfp4_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="scale of 129; allowed: up to 128"):
        mxfp4.to_codes(torch.zeros(1, 1, 16, dtype=torch.uint8), torch.full((1, 1), 129, dtype=torch.uint8))


def config_of(stored: str) -> ExpertsConfig:
    common: dict[str, Any] = {"num_experts": NUM_EXPERTS, "top_k": 3, "inner_size": 32, "stored": stored}
    if stored == "separate":
        shared = SharedConfig(inner_size=16, gate="shared_expert_gate")
        return ExpertsConfig(**common, shared=shared, router=RouterConfig(has_choice_bias=True))
    names = "experts.gate_up_proj", "experts.down_proj"
    limit = 0.0 if stored == "packed" else 7.0
    return ExpertsConfig(**common, names=names, router=RouterConfig(has_bias=True), limit=limit)


@pytest.mark.parametrize("stored", ["separate", "packed", "interleaved", "mxfp4"])
def test_layer_tensors_match_the_checkpoint_description(stored: str) -> None:
    config = config_of(stored)
    layer = SparseMLP(SIZE, config, PLACEMENT)
    assert {name: target.shape for name, target in layer.weights("").items()} == {
        name: spec.shape for name, spec in described_tensors(config, SIZE).items()
    }


@pytest.mark.parametrize("stored", ["separate", "packed", "interleaved", "mxfp4"])
def test_layers_can_be_reloaded(stored: str) -> None:
    torch.manual_seed(0)
    layer = SparseMLP(SIZE, config_of(stored), PLACEMENT)
    for name, target in layer.weights("").items():
        if target.tensor.dtype == torch.uint8:
            target.tensor.random_(*((120, 126) if name.endswith("_scales") else (0, 256)))
        else:
            target.tensor.copy_(torch.randn(target.shape) * 0.3)
    loaded = {name: target.tensor.clone() for name, target in layer.weights("").items()}
    layer.finish_loading()
    x = torch.randn(9, SIZE)
    expected = layer(x)
    layer.open_for_loading()
    reopened = layer.weights("")
    assert {name: target.tensor.tolist() for name, target in reopened.items()} == {
        name: tensor.tolist() for name, tensor in loaded.items()
    }
    changed = next(name for name in reopened if "down_proj" in name)
    reopened[changed].tensor.add_(2)
    layer.finish_loading()
    assert not torch.equal(layer(x), expected)
    layer.open_for_loading()
    layer.weights("")[changed].tensor.copy_(loaded[changed])
    layer.finish_loading()
    assert torch.equal(layer(x), expected)


def test_mxfp4_codes_can_be_stored_again() -> None:
    torch.manual_seed(0)
    config = config_of("mxfp4")
    codes = [
        mxfp4.to_codes(
            torch.randint(0, 256, (NUM_EXPERTS * rows, 1, 16), dtype=torch.uint8),
            torch.randint(120, 126, (NUM_EXPERTS * rows, 1), dtype=torch.uint8),
        )
        for rows in (64, SIZE)
    ]
    biases = torch.randn(NUM_EXPERTS, 64), torch.randn(NUM_EXPERTS, SIZE)
    tensors = expert_tensors.reopened(config, ExpertWeights(codes[0], codes[1], *biases), {})
    assert {name: tensor.shape for name, tensor in tensors.tensors.items()} == {
        name: spec.shape for name, spec in described_tensors(config, SIZE).items() if name.startswith("experts")
    }
    interleaved = tensors.tensors["experts.gate_up_proj_blocks"]
    assert torch.equal(interleaved[2, 6], mxfp4.to_blocks(codes[0])[2 * 64 + 3])
    for kept, before in zip(tensors.assemble()[:2], codes, strict=True):
        assert isinstance(kept, Codes)
        assert torch.equal(kept.packed, before.packed)
        assert torch.equal(kept.scales, before.scales)


def test_interleaved_gates_match_transformers() -> None:
    torch.manual_seed(0)
    theirs = GptOssExperts(
        GptOssConfig(num_local_experts=NUM_EXPERTS, hidden_size=SIZE, intermediate_size=32, swiglu_limit=0.5)
    )
    config = ExpertsConfig(
        num_experts=NUM_EXPERTS, top_k=3, inner_size=32, stored="interleaved", limit=0.5, alpha=1.702,
        names=("gate_up_proj", "down_proj"),
    )  # fmt: skip
    tensors = expert_tensors.empty(config, SIZE, PLACEMENT)
    for name, tensor in tensors.tensors.items():
        value = torch.randn(tensor.shape) * 0.3
        tensor.copy_(value)
        theirs.state_dict()[name].copy_(value)
    x = torch.randn(20, SIZE)
    chosen = routing.route(torch.randn(20, NUM_EXPERTS), None, 3, RouterConfig())
    expected = theirs(x, chosen.experts.long(), chosen.weights)
    torch.testing.assert_close(experts.prepare(tensors.assemble(), torch.float32)(x, chosen), expected)


PROGRAM = """
import torch

from aioengine.kernels import experts, routing
from aioengine.families._experts import RouterConfig
from aioengine.kernels.expert_types import SILU, ChosenExperts, ExpertWeights, GateFunction, SharedOutputs
from aioengine.kernels.triton import experts as on_device
from aioengine.kernels.triton import routing as routing_on_device
from tests.compute.kernels.test_experts import reference

torch.manual_seed(0)
for num_experts, own, has_bias in (
    (12, (3, RouterConfig()), False),
    (16, (4, RouterConfig(scoring="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_top=2)), True),
    (20, (4, RouterConfig(is_normalized=False, scale=16.0, num_groups=5, top_groups=2)), False),
):
    logits = torch.randn(5, num_experts)
    logits[0, 3] = logits[0, 5] = 9.0
    bias = torch.randn(num_experts) if has_bias else None
    chosen, weights = routing_on_device.route(logits, bias, *own)
    expected, expected_weights = routing.route(logits, bias, *own)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)

for num_experts, num_tokens, top_k, rows in ((12, 30, 3, 4), (5, 1, 2, 16), (6, 700, 2, 16), (12, 1500, 3, 128)):
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    chosen = ChosenExperts(chosen, torch.ones(chosen.shape))
    tiling = routing_on_device.align(chosen, num_experts=num_experts, rows=rows)
    seen = []
    for expert, first, end in tiling.tiles[:, : int(tiling.num_tiles)].T.tolist():
        pairs = tiling.order[first:end]
        assert 0 < end - first <= rows
        assert (chosen.experts.flatten()[pairs] == expert).all()
        assert (pairs.diff() > 0).all()
        seen += pairs.tolist()
    assert sorted(seen) == list(range(num_tokens * top_k))

num_experts, size, inner = 5, 80, 40
for gate, has_bias in ((SILU, False), (GateFunction(0.7, 1.702), True)):
    weights = ExpertWeights(
        torch.randn(num_experts, 2 * inner, size) * size**-0.5,
        torch.randn(num_experts, size, inner) * inner**-0.5,
        *((torch.randn(num_experts, 2 * inner), torch.randn(num_experts, size)) if has_bias else (None, None)),
        gate,
    )
    for num_tokens, batch_invariant in ((1, False), (3, True), (on_device.MAX_VECTOR_TOKENS + 20, False)):
        x = torch.randn(num_tokens, size)
        chosen = routing.route(torch.randn(num_tokens, num_experts), None, 3, RouterConfig())
        shared = SharedOutputs(torch.randn(num_tokens, size), torch.randn(num_tokens, 1)) if has_bias else None
        result = on_device.compute(x, chosen, weights, shared, batch_invariant=batch_invariant)
        torch.testing.assert_close(result, reference(x, chosen, weights, shared))
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)


COMPILED = """
import torch

from aioengine.families._experts import RouterConfig
from aioengine.kernels.expert_types import SILU, ChosenExperts, ExpertWeights, GateFunction, SharedOutputs
from aioengine.kernels.triton import experts, routing


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros((), dtype=dtype).expand(*shape)


for num_experts, top_k, size, inner, gate, dtype, pairs_of_an_expert in (
    (128, 8, 2048, 768, SILU, torch.bfloat16, (0, 4, 400)),
    (32, 4, 2880, 2880, GateFunction(7.0, 1.702), torch.bfloat16, (0, 16, 40)),
    (6, 2, 256, 320, SILU, torch.float32, (0, 4)),
):
    has_bias = gate is not SILU
    bias = zeros(num_experts, dtype=torch.float32) if has_bias else None
    routing.route(zeros(2, num_experts), bias, top_k, RouterConfig(scoring="sigmoid" if has_bias else "softmax"))
    biases = (zeros(num_experts, 2 * inner, dtype=dtype), zeros(num_experts, size, dtype=dtype))
    gate_up, down = zeros(num_experts, 2 * inner, size, dtype=dtype), zeros(num_experts, size, inner, dtype=dtype)
    weights = ExpertWeights(gate_up, down, *(biases if has_bias else (None, None)), gate)
    for count in pairs_of_an_expert:
        num_tokens = count * num_experts // top_k or 1
        x = zeros(num_tokens, size, dtype=dtype)
        chosen = zeros(num_tokens, top_k, dtype=torch.int32)
        chosen = ChosenExperts(chosen, zeros(num_tokens, top_k, dtype=torch.float32))
        shared = SharedOutputs(x, None if has_bias else zeros(num_tokens, 1, dtype=dtype))
        experts.compute(x, chosen, weights, shared, batch_invariant=False)
    experts.compute(x, chosen, weights, None, batch_invariant=not has_bias)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(COMPILED)
