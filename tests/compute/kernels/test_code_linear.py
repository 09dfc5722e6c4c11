"""Products with weights of few bits, compared with products of the dequantized weight."""

from __future__ import annotations

from tests.compute.interpreted import run_compiled, run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.kernels.triton.code_linear import (
    dequantize, matmul, num_tiles, supports, supports_vector, vector_matmul
)
from aioengine.kernels.triton.device_codes import device_codes


def check(codes, num_rows):
    expected, on_device = codes.dequantized(torch.float32), device_codes(codes)
    torch.testing.assert_close(dequantize(on_device, torch.float32), expected)
    assert supports(codes.shape[1], codes.group, codes.bits) == (codes.shape[1] % 128 == 0)
    if codes.shape[1] % 128:
        return
    x, bias = torch.randn(num_rows, codes.shape[1]), torch.randn(codes.shape[0])
    num_done = torch.zeros(num_tiles(codes.shape[0]), dtype=torch.int32)
    for _ in range(2):
        result = matmul(x, on_device, bias, num_done)
        torch.testing.assert_close(result, x @ expected.T + bias, rtol=1e-4, atol=1e-2)
    assert not num_done.any()
    half = x.half()  # the interpreter does not convert to bfloat16 correctly
    result = matmul(half, on_device, None, num_done)
    error = (result.float() - half.float() @ expected.T).norm() / result.float().norm()
    assert error < 0.01, error
    if supports_vector(on_device):
        x = x[:1].bfloat16()
        result, exact = vector_matmul(x, on_device, bias).float(), x.float() @ expected.T + bias
        assert (result - exact).norm() / result.norm() < 0.01


torch.manual_seed(0)
for outputs, inputs, group, num_rows in (
    (100, 256, 32, 3), (64, 1280, 128, 20), (70, 256, 256, 1), (64, 128, 64, 2), (64, 192, 64, 2), (64, 96, 32, 2),
):
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales, offsets = torch.randn(2, outputs, inputs // group)
    codes = Codes(pack_nibbles(numbers), scales, offsets, bits=4)
    assert torch.equal(codes.unpacked(), numbers)
    integers = codes._replace(offsets=-torch.randint(0, 16, scales.shape) * scales)
    scales = scales.clone()
    scales[:5] = 0
    constant = codes._replace(scales=scales, offsets=torch.where(scales == 0, 1.0, -8 * scales))
    equal = constant._replace(offsets=-8 * scales)
    assert device_codes(equal).zero == 8
    plain = codes._replace(offsets=None)
    for same in (codes, integers, constant, equal, plain, plain._replace(table=torch.randn(16))):
        check(same, num_rows)
for outputs, inputs, group, num_rows in ((64, 256, 64, 5), (96, 384, 128, 70), (64, 256, 16, 4), (64, 256, 256, 2)):
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    codes = Codes(numbers, *torch.rand(2, outputs, inputs // group))
    for same in (codes, codes._replace(offsets=None)):
        check(same, num_rows)
for inputs, num_groups in ((256, 1), (256, 2), (384, 3), (320, 3)):
    check(Codes(torch.randn(64, inputs).to(torch.float8_e4m3fn), torch.rand(64, num_groups)), 4)
"""


def test_kernels_match_the_dequantized_product() -> None:
    run_interpreted(PROGRAM)


COMPILED = """
import torch

from aioengine.kernels.codes import Codes
from aioengine.kernels.triton.code_linear import dequantize, matmul, supports_vector, vector_matmul
from aioengine.kernels.triton.device_codes import device_codes

for numbers, shape, bits, group, has_offsets in (
    (torch.float8_e4m3fn, (256, 1024), 8, 1024, False), (torch.float8_e4m3fn, (256, 1024), 8, 128, False),
    (torch.int8, (256, 1024), 8, 16, True), (torch.int8, (256, 1024), 8, 128, True),
    (torch.uint8, (256, 512), 4, 32, True), (torch.uint8, (256, 512), 4, 128, True),
    (torch.uint8, (256, 512), 4, 64, False),
):
    scales = torch.ones(256, 1024 // group)
    codes = Codes(torch.zeros(shape, dtype=numbers), scales, scales * 0.3 if has_offsets else None, bits)
    tables = (None, torch.zeros(16)) if bits == 4 else (None,)
    offsets = (codes.offsets, -scales) if has_offsets else (None,)
    for table in tables:
        for own in offsets:
            on_device = device_codes(codes._replace(offsets=own, table=table))
            for x in (torch.zeros(16, 1024, dtype=torch.bfloat16), torch.zeros(3, 1024, dtype=torch.float16)):
                matmul(x, on_device, None, torch.zeros(64, dtype=torch.int32))
                dequantize(on_device, x.dtype)
            if supports_vector(on_device):
                for is_gated in (False, bits == 4):
                    vector_matmul(x[:1].bfloat16(), on_device, scales[:, 0].clone(), is_gated=is_gated)
"""


def test_kernels_compile_for_hopper() -> None:
    run_compiled(COMPILED)
