"""Batch-invariant products match torch in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.triton import invariant_linear
from aioengine.kernels.triton.activation import activate_and_mul
from aioengine.kernels.triton.code_linear import num_tiles

invariant_linear.has_dependent_launch = lambda: True
torch.manual_seed(0)
for num_outputs, size, num_rows in (
    (100, 512, 300),
    (40, 512, 20),
    (300, 2048, 150),  # two sums
    (70, 2048, 300),
    (70, 2048, 20),  # two sums, of two programs
    (70, 2048, 1),
    (70, 512, 1),
    (20, 6144, 1),
    (100, 200, 30),  # the kernel for all sizes
):
    weight, x, bias = (torch.randn(*shape).half() for shape in ((num_outputs, size), (num_rows, size), (num_outputs,)))
    num_done = torch.zeros(num_tiles(num_outputs), dtype=torch.int32)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    for is_constant in (True, False):
        result = invariant_linear.InvariantMatmul(weight, bias, num_done, is_constant=is_constant)(x)
        assert not num_done.any()
        torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-2)
invariant_linear.PROCESSORS = 4
for num_rows in (1, 20, 300):
    weight, x = (torch.randn(400, 512) / 20).half(), torch.randn(num_rows, 512).half()
    result = invariant_linear.InvariantMatmul(weight, None).gated(x)
    expected = activate_and_mul(torch.nn.functional.linear(x.float(), weight.float()), "silu")
    torch.testing.assert_close(result.float(), expected, rtol=4e-3, atol=4e-3)
"""


@pytest.mark.slow
def test_products_match_torch() -> None:
    run_interpreted(PROGRAM)
