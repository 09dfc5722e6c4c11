"""Products with weights of few bits, compared with products of the dequantized weight."""

from __future__ import annotations

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.kernels.triton.code_linear import dequantize, matmul, num_tiles, shape_of_programs, vector_matmul


def check(codes, num_rows):
    expected = codes.dequantized(torch.float32)
    torch.testing.assert_close(dequantize(codes, torch.float32), expected)
    programs = shape_of_programs(*codes.shape, codes.group, codes.bits)
    assert (programs is None) == (codes.shape[1] % 128 == 64)
    if programs is None:
        return
    x, bias = torch.randn(num_rows, codes.shape[1]), torch.randn(codes.shape[0])
    num_done = torch.zeros(num_tiles(codes.shape[0]), dtype=torch.int32)
    for _ in range(2):
        result = matmul(x, codes, bias, programs=programs, num_done=num_done)
        torch.testing.assert_close(result, x @ expected.T + bias, rtol=1e-4, atol=1e-2)
    assert not num_done.any()
    half = x.half()  # the interpreter does not convert to bfloat16 correctly
    result = matmul(half, codes, None, programs=programs, num_done=num_done)
    error = (result.float() - half.float() @ expected.T).norm() / result.float().norm()
    assert error < 0.01, error
    for block in (128, 256):
        result = vector_matmul(x[:1], codes, bias, programs=(4, block, 4))
        torch.testing.assert_close(result, x[:1] @ expected.T + bias, rtol=1e-4, atol=1e-2)


torch.manual_seed(0)
for outputs, inputs, group, num_rows in ((100, 256, 32, 3), (64, 512, 128, 20), (70, 256, 256, 1)):
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales, offsets = torch.randn(2, outputs, inputs // group)
    codes = Codes(pack_nibbles(numbers), scales, offsets, bits=4)
    assert torch.equal(codes.unpacked(), numbers)
    for same in (codes, codes._replace(offsets=None, table=torch.randn(16))):
        check(same, num_rows)
for outputs, inputs, group, num_rows in ((64, 256, 64, 5), (96, 384, 128, 17), (64, 256, 16, 4), (64, 256, 256, 2)):
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes = Codes(numbers, *torch.rand(2, outputs, inputs // group))
    for same in (codes, codes._replace(offsets=None)):
        check(same, num_rows)
for inputs, num_groups in ((256, 1), (256, 2), (384, 3), (320, 3)):
    check(Codes(torch.randn(64, inputs).to(torch.float8_e4m3fn), torch.rand(64, num_groups)), 4)
"""


def test_kernels_match_the_dequantized_product() -> None:
    run_interpreted(PROGRAM)
