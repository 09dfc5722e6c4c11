"""Products of 8-bit tensor core instructions, compared with products of the dequantized weight."""

from __future__ import annotations

from tests.compute.interpreted import run_compiled, run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.codes import Codes
from aioengine.kernels.triton import byte_linear
from aioengine.kernels.triton.code_linear import num_tiles
from aioengine.kernels.triton.device_codes import device_codes

torch.manual_seed(0)
x = torch.randn(3, 320)
for group in (320, 128):
    numbers, scales = byte_linear.quantize_rows(x, group)
    parts = torch.nn.functional.pad(x, (0, -320 % group)).view(3, -1, group)
    assert numbers.shape == (4, 320)
    # the interpreter rounds to fp8 incorrectly
    torch.testing.assert_close(scales[:, :3], parts.abs().amax(2).t() / 448)
    assert numbers[:3].float().abs().amax(1).eq(448).all()

x = torch.randn(3, 256).bfloat16().float()
for dtype, low in ((byte_linear.FP8, byte_linear.FP8_LOW_FACTOR), (torch.int8, byte_linear.INT8_LOW_FACTOR)):
    numbers, scales = byte_linear.quantize_rows(x, 256, dtype, low)
    high, low_numbers = numbers.float().view(2, 4, 256)[:, :3]
    sums = high + low_numbers / low
    torch.testing.assert_close(sums * scales[0, :3, None], x, rtol=0, atol=float(x.abs().max()) / 2**15)


def check_bytes(codes, num_rows, has_bias):
    assert byte_linear.supports(device_codes(codes))
    x = torch.randn(num_rows, codes.shape[1]).bfloat16().float()
    bias = torch.randn(len(codes.packed)) if has_bias else None
    num_done = torch.zeros(num_tiles(codes.shape[0]), dtype=torch.int32)
    expected = torch.nn.functional.linear(x, codes.dequantized(torch.float32), bias)
    gates, ups = expected.chunk(2, 1)
    is_rounded = codes.packed.dtype == byte_linear.FP8 and num_rows > byte_linear.MAX_FP8_PAIRS
    for is_gated, right in ((True, torch.nn.functional.silu(gates) * ups), (False, expected)):
        result = byte_linear.matmul(x, device_codes(codes), bias, num_done, is_gated=is_gated)
        error = (result - right).norm() / right.norm()
        assert error < (0.1 if is_rounded else 1e-3), error
        assert not num_done.any()
    x[1, 5] = float("nan")
    result = byte_linear.matmul(x, device_codes(codes), bias, num_done)
    assert result[1].isnan().all() and not result[0].isnan().any()


for group, num_rows, has_bias in ((256, 3, True), (128, 5, False), (128, 20, False), (256, 66, True)):
    scales = torch.rand(70, 256 // group)
    check_bytes(Codes(torch.randn(70, 256).to(byte_linear.FP8), scales), num_rows, has_bias)
    check_bytes(Codes(torch.randint(-128, 128, (70, 256), dtype=torch.int8), scales), num_rows, has_bias)
"""


def test_products_match_the_dequantized_product() -> None:
    run_interpreted(PROGRAM)


COMPILED = """
import torch

from aioengine.kernels.codes import Codes
from aioengine.kernels.triton import byte_linear
from aioengine.kernels.triton.device_codes import device_codes

for dtype in (byte_linear.FP8, torch.int8):
    for group in (1024, 128):
        codes = device_codes(Codes(torch.zeros(256, 1024, dtype=dtype), torch.ones(256, 1024 // group)))
        for num_rows in (3, 30, 100):
            x = torch.zeros(num_rows, 1024, dtype=torch.bfloat16)
            byte_linear.matmul(x, codes, None, torch.zeros(64, dtype=torch.int32), is_gated=group == 128)
"""


def test_kernels_compile_for_hopper() -> None:
    run_compiled(COMPILED)
