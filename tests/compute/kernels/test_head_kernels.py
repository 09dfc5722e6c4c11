"""Kernels for separate q, k and v tensors: rotation and writes to pages, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from aioengine.kernels.heads import rotate_qk
from tests.compute.interpreted import run_compiled, run_interpreted

HEADS = """
import torch

from aioengine.kernels.heads import rotate_qk, write_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton import heads

torch.manual_seed(0)


def split_qkv(num_query, num_kv, size, dtype):
    # views [1, H, T, E] of the result [T, (H + 2 K) * E] of a fused matmul
    fused = torch.randn(5, (num_query + 2 * num_kv) * size).to(dtype)
    parts = fused.split([num_query * size, num_kv * size, num_kv * size], dim=1)
    return [part.view(1, 5, -1, size).transpose(1, 2) for part in parts]


CASES = [
    (num_query, num_kv, size, dtype)
    for num_query, num_kv, size in ((4, 2, 8), (7, 1, 6), (20, 20, 12))
    for dtype in (torch.float32, torch.float16)  # the interpreter rounds bf16 differently
]
"""
AGREES = """
for num_query, num_kv, size, dtype in CASES:
    q, k, v = split_qkv(num_query, num_kv, size, dtype)
    cos, sin = torch.randn(2, 1, 5, size).to(dtype)
    turned = heads.rotate_qk(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    for rotated, expected in zip(turned, rotate_qk(q, k, cos, sin), strict=True):
        torch.testing.assert_close(rotated.transpose(0, 1)[None], expected, rtol=1e-6, atol=1e-6)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    slots = torch.tensor([9, 3, 4, 8, 11], dtype=torch.int32)
    for out in (None, torch.zeros(5, num_query + 2 * num_kv, size, dtype=dtype)):
        pools, expected = torch.zeros(2, 2, 3, num_kv, 4, size, dtype=dtype)
        wanted = write_heads(q, k, v, KVTarget(slots, *expected, out if out is None else out.clone()))
        heads.write(q, k, v, KVTarget(slots, *pools, out))
        assert torch.equal(pools, expected)
        assert out is None or torch.equal(out, torch.cat(wanted, dim=1))
"""
COMPILES = """
def compiled(launcher, *call):
    code = compile_for_hopper(launcher, *call).asm["ptx"]
    if launcher is heads._rotate_qk_kernel:
        assert "mul" in code and "fma" not in code, "products are not rounded before they are added"


type(heads._rotate_qk_kernel).__call__ = compiled
for size, dtype in ((128, torch.bfloat16), (128, torch.float16), (80, torch.float32)):
    num_query, num_kv = 32, 8
    q, k, v = (x[0].transpose(0, 1) for x in split_qkv(num_query, num_kv, size, dtype))
    heads.rotate_qk(q, k, *torch.zeros(2, 5, size, dtype=dtype))
    for out in (None, torch.zeros(5, num_query + 2 * num_kv, size, dtype=dtype)):
        pools = torch.zeros(2, 3, num_kv, 4, size, dtype=dtype)
        heads.write(q, k, v, KVTarget(torch.zeros(5, dtype=torch.int32), *pools, out))
"""


def test_rotation_equals_complex_multiplication() -> None:
    """In heads [1, H, T, E], elements i and i + E / 2 form a complex number."""
    q, k = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8)
    angles = torch.randn(1, 5, 4)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    results = rotate_qk(q, k, angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2))
    for x, rotated in zip((q, k), results, strict=True):
        expected = torch.complex(*x.chunk(2, dim=-1)) * turns
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(HEADS + AGREES)


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(HEADS + COMPILES)
