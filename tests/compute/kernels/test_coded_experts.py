"""Experts with weights of few bits, compared with the dequantized weights."""

from __future__ import annotations

import pytest
import torch

from aioengine.families._experts import RouterConfig
from aioengine.kernels import experts, mxfp4, routing
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.kernels.expert_types import SILU, ExpertWeights, GateFunction
from tests.compute.interpreted import run_compiled, run_interpreted
from tests.compute.quantized import assert_close

NUM_EXPERTS = 5
KINDS = ("mxfp4", "int4", "int8", "fp8")


def random_codes(kind: str, outputs: int, inputs: int) -> Codes:
    scale = inputs**-0.5
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8)
        return mxfp4.to_codes(blocks, torch.randint(121, 125, (outputs, inputs // 32), dtype=torch.uint8))
    if kind == "int4":
        scales = torch.rand(outputs, inputs // 32) * scale / 4
        numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        return Codes(pack_nibbles(numbers), scales, -8 * scales, bits=4)
    numbers = torch.randn(outputs, inputs) * 30
    scales = torch.rand(outputs, 1 if kind == "int8" else -(-inputs // 128)) * scale / 15
    return Codes(numbers.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn), scales)


def random_weights(kind: str, size: int, inner: int, dtype: torch.dtype, *, has_bias: bool) -> ExpertWeights:
    biases = None, None
    if has_bias:
        biases = torch.randn(NUM_EXPERTS, 2 * inner, dtype=dtype), torch.randn(NUM_EXPERTS, size, dtype=dtype)
    gate_up, down = random_codes(kind, NUM_EXPERTS * 2 * inner, size), random_codes(kind, NUM_EXPERTS * size, inner)
    return ExpertWeights(gate_up, down, *biases, GateFunction(0.7, 1.702) if has_bias else SILU)


def dequantized(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    gate_up, down, *others = weights
    assert isinstance(gate_up, Codes)
    assert isinstance(down, Codes)
    wide = (codes.dequantized(dtype).view(NUM_EXPERTS, -1, codes.shape[1]) for codes in (gate_up, down))
    return ExpertWeights(*wide, *others)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_match_the_dequantized_weights(kind: str) -> None:
    torch.manual_seed(0)
    weights = random_weights(kind, 96, 160, torch.float32, has_bias=True)
    kept = experts.prepare(weights, torch.float32)
    wide = experts.prepare(dequantized(weights, torch.float32), torch.float32)
    x = torch.randn(30, 96)
    chosen = routing.route(torch.randn(30, NUM_EXPERTS), None, 3, RouterConfig())
    assert_close(kept(x, chosen), wide(x, chosen), {"int4": 4, "int8": 8}.get(kind, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_other_rows(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    computed = experts.prepare(random_weights(kind, 96, 160, dtype, has_bias=True), dtype)
    x, logits = torch.randn(70, 96).to(dtype), torch.randn(70, NUM_EXPERTS)
    whole = computed(x, routing.route(logits, None, 3, RouterConfig()))
    for rows in (slice(0, 1), slice(7, 9), slice(3, 60)):
        assert torch.equal(computed(x[rows], routing.route(logits[rows], None, 3, RouterConfig())), whole[rows])


PROGRAM = """
import torch

from aioengine.families._experts import RouterConfig
from aioengine.kernels import routing
from aioengine.kernels.expert_types import SharedOutputs
from aioengine.kernels.triton import experts
from tests.compute.kernels.test_coded_experts import NUM_EXPERTS, dequantized, random_weights
from tests.compute.kernels.test_experts import reference
from aioengine.kernels.triton.code_linear import dequantize
from aioengine.kernels.triton.expert_codes import device_weights

torch.manual_seed(0)
for kind, size, inner in (
    ("mxfp4", 96, 128), ("mxfp4", 192, 160), ("int4", 96, 64), ("int8", 80, 40), ("fp8", 200, 64)
):
    for has_bias in (False, True):
        weights = random_weights(kind, size, inner, torch.float32, has_bias=has_bias)
        for num_tokens, batch_invariant in ((1, False), (3, True), (experts.MAX_VECTOR_TOKENS + 20, False)):
            x = torch.randn(num_tokens, size)
            chosen = routing.route(torch.randn(num_tokens, NUM_EXPERTS), None, 3, RouterConfig())
            shared = SharedOutputs(torch.randn(num_tokens, size), torch.randn(num_tokens, 1)) if has_bias else None
            expected = reference(x, chosen, dequantized(weights, torch.float32), shared)
            result = experts.compute(x, chosen, device_weights(weights), shared, batch_invariant=batch_invariant)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    codes = device_weights(weights).gate_up
    wide = dequantize(codes, torch.float32).view(NUM_EXPERTS, -1, codes.shape[1])
    torch.testing.assert_close(wide, dequantized(weights, torch.float32).gate_up)
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)


COMPILED = """
import torch

from aioengine.kernels.expert_types import SILU, ChosenExperts, ExpertWeights, GateFunction
from aioengine.kernels.triton import experts
from aioengine.kernels.triton.device_codes import DeviceCodes


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros((), dtype=dtype).expand(*shape)


def codes(kind, outputs, inputs):
    if kind in ("fp8", "int8"):
        numbers = zeros(outputs, inputs, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
        scales = zeros(-(-inputs // 128) if kind == "fp8" else 1, outputs, dtype=torch.float32)
        return DeviceCodes(numbers, scales, None, None, None, 8, 128 if kind == "fp8" else inputs, -1)
    numbers = zeros(outputs, inputs // 4, dtype=torch.int16)
    if kind == "mxfp4":
        scales, table = zeros(inputs // 32, outputs, dtype=torch.uint8), zeros(16, dtype=torch.float32)
        return DeviceCodes(numbers, scales, None, None, table, 4, 32, -1)
    scales = zeros(inputs // 128, outputs, dtype=torch.float32)
    return DeviceCodes(numbers, scales, None, None, None, 4, 128, 8)


for kind, num_experts, top_k, size, inner, gate in (
    ("mxfp4", 32, 4, 2880, 2880, GateFunction(7.0, 1.702)),
    ("int4", 128, 8, 2048, 768, SILU),
    ("int8", 128, 8, 2048, 768, SILU),
    ("fp8", 128, 8, 2048, 768, SILU),
):
    gate_up, down = codes(kind, num_experts * 2 * inner, size), codes(kind, num_experts * size, inner)
    weights = ExpertWeights(gate_up, down, None, None, gate)
    for count in (0, 4, 16, 40, 400):
        num_tokens = count * num_experts // top_k or 1
        x = zeros(num_tokens, size)
        chosen = zeros(num_tokens, top_k, dtype=torch.int32)
        chosen = ChosenExperts(chosen, zeros(num_tokens, top_k, dtype=torch.float32))
        experts.compute(x, chosen, weights, None, batch_invariant=False)
    experts.compute(x, chosen, weights, None, batch_invariant=True)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(COMPILED)
