"""Products with weights of few bits, compared with products of the dequantized weight."""

from __future__ import annotations

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.codes import Codes
from aioengine.kernels.triton.code_linear import dequantize, matmul, num_tiles, shape_of_programs


def check(codes, num_rows):
    expected = codes.dequantized(torch.float32)
    torch.testing.assert_close(dequantize(codes, torch.float32), expected)
    programs = shape_of_programs(*codes.shape, codes.group)
    assert (programs is None) == (codes.shape[1] % 128 == 64)
    if programs is None:
        return
    x, bias = torch.randn(num_rows, codes.shape[1]), torch.randn(codes.shape[0])
    num_done = torch.zeros(num_tiles(codes.shape[0]), dtype=torch.int32)
    for _ in range(2):
        result = matmul(x, codes, bias, programs=programs, num_done=num_done)
        torch.testing.assert_close(result, x @ expected.T + bias, rtol=1e-4, atol=1e-2)
    assert not num_done.any()
    for dtype in (torch.float16,):  # the interpreter does not reinterpret bits as bfloat16
        half = x.to(dtype)
        result = matmul(half, codes, None, programs=programs, num_done=num_done)
        error = (result.float() - half.float() @ expected.T).norm() / result.float().norm()
        assert error < 0.01, (dtype, error)


torch.manual_seed(0)
for bits, outputs, inputs, group, num_rows in (
    (4, 100, 256, 32, 3), (4, 64, 512, 128, 20), (4, 70, 256, 256, 1), (8, 64, 256, 64, 5), (8, 96, 128, 128, 17),
):
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (outputs, inputs // group), dtype=torch.int16)
    codes = Codes.of(numbers, torch.rand(outputs, inputs // group), zeros, bits)
    assert torch.equal(codes.unpacked(), numbers)
    check(codes, num_rows)
for inputs, num_groups in ((256, 1), (256, 2), (320, 3)):
    check(Codes(torch.randn(64, inputs).to(torch.float8_e4m3fn), torch.rand(64, num_groups)), 4)
check(Codes(torch.randint(-128, 128, (64, 256), dtype=torch.int8), torch.rand(64, 1)), 4)
"""


def test_kernels_match_the_dequantized_product() -> None:
    run_interpreted(PROGRAM)
