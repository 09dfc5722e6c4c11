"""Products of int8 weights with activations that are quantized per token."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

import pytest
import torch

from aioengine.kernels import int8_linear, linear
from aioengine.kernels.codes import Codes
from aioengine.kernels.row_counts import Matmul


def check_products(num_inputs: int) -> None:
    """Compare with products in 64-bit integers, for large numbers of one sign, in the whole batch and row by row."""
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (70, num_inputs)).to(torch.int8)
    weight[0], weight[1] = 127, -128
    scales, bias = torch.rand(70, 1) + 0.1, torch.randn(70)
    x = torch.randint(-127, 128, (150, num_inputs)).float()
    x[0], x[:, 0] = 127, 127
    prepared = int8_linear.prepare(Codes(weight, scales), bias)
    result = prepared.matmul(x * 0.5)
    sums = (x.long() @ weight.long().t()).double()
    torch.testing.assert_close(result.double(), sums * 0.5 * scales.t().double() + bias, rtol=1e-6, atol=1e-2)
    for rows in (slice(0, 1), slice(3, 10), slice(140, 150)):
        assert torch.equal(prepared.matmul(x[rows] * 0.5), result[rows])
    assert torch.equal(prepared.restore().packed, weight)


@pytest.mark.parametrize("num_inputs", [1, 300, 2500])
@pytest.mark.parametrize("bits", [7, 8])
def test_integer_products_are_exact(num_inputs: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if bits == 8:
        assert int8_linear.part_bits() == (8 if torch.cpu._is_vnni_supported() else 7)
    else:
        monkeypatch.setattr(int8_linear, "part_bits", lambda: bits)
    check_products(num_inputs)


def test_integer_products_are_exact_on_a_cpu_without_vnni() -> None:
    """There oneDNN adds products in 16 bits, which overflow."""
    code = (
        "from tests.compute.kernels.test_int8_linear import check_products, int8_linear; "
        "assert int8_linear.part_bits() == 7; check_products(300)"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("num_inputs", [2, 300, 2500])
@pytest.mark.parametrize("bits", [7, None])
def test_activations_of_14_or_16_bits_are_nearly_exact(
    num_inputs: int, is_shared: bool, dtype: torch.dtype, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token has a number 1,000 times as large as the others."""
    if bits is not None:
        monkeypatch.setattr(int8_linear, "part_bits", lambda: bits)
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (70, num_inputs)).to(torch.int8)
    codes, bias = Codes(weight, torch.rand(70, 1) + 0.1), torch.randn(70)
    x = torch.randn(150, num_inputs).to(dtype)
    x[0] *= 1e-6
    x[1, 0], x[2], x[3, 0] = 1000, 0, torch.nan
    prepared = int8_linear.prepare(codes, bias, activation_bits=16, is_shared=is_shared)
    result = prepared.matmul(x)
    expected = x.double() @ codes.dequantized(torch.float64).t() + bias
    errors = (result - expected).norm(dim=1) / expected.norm(dim=1)
    is_wide = int8_linear.part_bits() == 8
    limits = torch.full((150,), 3e-3 if dtype == torch.bfloat16 else 1e-4 if is_wide else 4e-4)
    limits[1] = 3e-3 if is_wide else 1e-2
    assert errors[3].isnan()
    assert (errors < limits).sum() == 149
    for rows in (slice(0, 1), slice(4, 10), slice(140, 150)):
        assert torch.equal(prepared.matmul(x[rows]), result[rows])
    assert torch.equal(prepared.restore().packed, weight)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(3, 512), (64, 512), (256, 512), (1792, 256)])
@pytest.mark.parametrize("bits", [8, 16])
def test_products_have_only_sizes_with_fast_onednn_kernels(
    num_outputs: int, num_inputs: int, bits: Literal[8, 16], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits were measured with AMX."""
    sizes: list[tuple[int, int]] = []

    def record(packed: torch.Tensor, scales: torch.Tensor, bits: int) -> Matmul:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            sizes.append((len(x), len(x) * num_outputs))
            return torch.zeros(len(x), num_outputs)

        return multiply

    monkeypatch.setattr(int8_linear, "part_bits", lambda: 8)
    monkeypatch.setattr(linear, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(int8_linear, "_onednn_matmul", record)
    codes = Codes(torch.zeros(num_outputs, num_inputs, dtype=torch.int8), torch.ones(num_outputs, 1))
    matmul = int8_linear.prepare(codes, None, activation_bits=bits).matmul
    for num_rows in (1, 2, 3, 5, 130):
        assert matmul(torch.zeros(num_rows, num_inputs)).shape == (num_rows, num_outputs)
    assert all(rows > 1 and size > 256 for rows, size in sizes)


def test_a_weight_with_one_output_has_a_product() -> None:
    codes = Codes(torch.ones(1, 64, dtype=torch.int8), torch.ones(1, 1))
    assert int8_linear.prepare(codes, None).matmul(torch.ones(3, 64)).flatten().tolist() == [64.0] * 3
