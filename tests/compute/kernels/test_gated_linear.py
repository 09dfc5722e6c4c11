"""The fused gate and up projection, compared with separate operations; activations; norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional

from aioengine.families._block_config import Activation
from aioengine.kernels import activation, gated_linear, linear
from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.triton.gated_linear import matmul
from aioengine.kernels.triton.skinny_linear import gated_vector_matmul

torch.manual_seed(0)
for num_outputs, size, num_rows, programs in (
    (100, 128, 20, (32, 64, 2, 4, 16, 16)),  # the last tiles are partly beyond the end
    (64, 64, 5, (32, 64, 2, 4, 16, 0)),
    (40, 192, 16, (64, 128, 2, 4, 16, 0)),
):
    weight, x = torch.randn(2 * num_outputs, size), torch.randn(num_rows, size)
    result = matmul(x, weight, programs)
    expected = activate_and_mul(torch.nn.functional.linear(x, weight), "silu")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gated_vector_matmul(x[:1], weight), expected[:1], rtol=1e-4, atol=1e-4)
weight, x = torch.randn(6, 2500), torch.randn(1, 2500)  # each program computes one output
expected = activate_and_mul(torch.nn.functional.linear(x, weight), "silu")
torch.testing.assert_close(gated_vector_matmul(x, weight), expected, rtol=1e-4, atol=1e-4)
narrow, scales = weight.to(torch.float8_e4m3fn), torch.rand(1, 6)
expected = activate_and_mul(torch.nn.functional.linear(x, narrow.float() * scales.T), "silu")
torch.testing.assert_close(gated_vector_matmul(x, narrow, scales), expected, rtol=1e-4, atol=1e-4)
"""

ACTIVATIONS = """
import torch

from torch.nn import functional

from aioengine.kernels.norms import norm_and_add
from aioengine.kernels.triton import activation, norms

torch.manual_seed(0)
for num_rows, size in ((3, 40), (1, 1500), (5, 64)):
    x = torch.randn(num_rows, 2 * size) * 4
    for name, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        result = activation.activate_and_mul(x, name)
        expected = functional.gelu(x[:, :size], approximate=approximate) * x[:, size:]
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)
    weight, epsilon = torch.randn(2 * size), torch.tensor(1e-6)
    half = x.bfloat16()
    wide = half.float() * torch.rsqrt(half.float().square().mean(-1, keepdim=True) + epsilon)
    result = norms.add_rms_norm(None, half, weight, epsilon)
    torch.testing.assert_close(result, (wide * weight).bfloat16(), atol=0, rtol=0.008)
    pre_weight = torch.randn(2 * size)
    for kind, wide in ((torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16)):
        for pre in (pre_weight.to(wide), None):
            delta, stream, post = torch.randn_like(x).to(kind), x.to(kind, copy=True), weight.to(wide)
            expected_stream = stream.clone()
            expected = norm_and_add(delta, expected_stream, post, pre, epsilon=epsilon)
            result = norms.add_rms_norm(delta, stream, pre, epsilon, post=post)
            torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-3)
            torch.testing.assert_close(stream, expected_stream, atol=2e-2, rtol=2e-3)
"""


@pytest.mark.parametrize("has_bias", [False, True])
def test_matmul_matches_the_reference(has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 16), torch.randn(5, 16)
    bias = torch.randn(24) if has_bias else None
    matmul = gated_linear.prepare(linear.prepare(weight.clone(), bias), weight.clone(), bias)
    torch.testing.assert_close(matmul(x), activation.activate_and_mul(functional.linear(x, weight, bias), "silu"))


def test_programs_cover_the_rows_and_fit_into_shared_memory() -> None:
    pytest.importorskip("triton")
    from aioengine.kernels.triton.gated_linear import shape_of_programs

    for num_outputs, size, num_rows in itertools.product((3072, 8192, 14_336), (1000, 1024, 4096), range(1, 300)):
        programs = shape_of_programs(num_outputs, size, num_rows)
        if programs is None:
            continue
        outputs, block, stages, _, rows, more = programs
        assert rows + more >= num_rows
        assert stages * (rows + more + 2 * outputs) * block * 2 < 227 * 1024
    assert shape_of_programs(14_336, 4096, 1) is None
    assert shape_of_programs(14_336, 4096, 128) is not None
    assert shape_of_programs(3072, 1024, 128) is None


@pytest.mark.slow
def test_kernel_matches_the_reference() -> None:
    run_interpreted(PROGRAM)


@pytest.mark.slow
def test_activation_and_norm_kernels_match_torch() -> None:
    run_interpreted(ACTIVATIONS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", partial(functional.gelu, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
def test_activations_match_torch(name: Activation, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 50) * 3
    torch.testing.assert_close(activation.activate(x.clone(), name), expected(x))
    torch.testing.assert_close(activation.activate_and_mul(x.clone(), name), expected(x[:, :25]) * x[:, 25:])
