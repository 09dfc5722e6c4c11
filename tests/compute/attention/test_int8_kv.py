"""Attention with int8 keys and values on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aioengine.attention import _image_attention, _mixed
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention.fused import CHUNK, FusedAttention, supports
from aioengine.attention.torch import TorchAttention
from tests.compute.attention import test_image_attention
from tests.compute.models.test_independence import run_attention

PAGE_SIZE = 16
LENGTH = CHUNK + 77
NUM_PAGES = -(-LENGTH // PAGE_SIZE)
SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_size=64, scale=0.2, dtype=torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Round x [..., E] to multiples of the scale of its head."""
    scales = (x.float().abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return ((x.float() / scales).round().clamp(-127, 127) * scales).to(x.dtype)


def pool(shape: AttentionShape, *, is_int8: bool) -> Tensor:
    scale_bytes, dtype = (2, torch.int8) if is_int8 else (0, shape.dtype)
    size = kv_pool_shape(shape, num_pages=2 * NUM_PAGES, page_size=PAGE_SIZE, scale_bytes=scale_bytes)
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "dtype", "window", "has_sinks"),
    [
        (FusedAttention, torch.float32, None, False),
        (FusedAttention, torch.bfloat16, 300, True),
        (TorchAttention, torch.float32, 70, True),
    ],
)
def test_results_are_those_of_rounded_keys_and_values_in_any_chunks(
    backend: type[FusedAttention] | type[TorchAttention], dtype: torch.dtype, window: int | None, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    sinks = (torch.randn(6),) if has_sinks else ()
    shape = replace(SHAPE, windows=(window,), sinks=sinks, dtype=dtype)
    if backend is FusedAttention and not supports(shape, dtype, torch.device("cpu")):
        pytest.skip("torch's fused attention depends on the batch on this CPU")
    q, k, v = (torch.randn(LENGTH, heads, 64).to(dtype) for heads in (6, 2, 2))
    k[:, 1] *= 1000
    pages = list(range(NUM_PAGES))
    plain = backend(shape, pool(shape, is_int8=False))
    expected = run_attention(plain, (q, rounded(k), rounded(v)), [(0, LENGTH)], pages)
    quantized = backend(shape, pool(shape, is_int8=True))
    assert torch.equal(run_attention(quantized, (q, k, v), [(0, LENGTH)], pages), expected)
    table = (torch.randperm(NUM_PAGES) + NUM_PAGES).tolist()
    start = 0
    for count in (100, 1, 7, 1, LENGTH - 109):
        part = run_attention(quantized, (q, k, v), [(start, count)], table)
        assert torch.equal(part, expected[start : start + count])
        start += count
    rows = [(5, 1), (300, 40), (LENGTH - 1, 1), *[(580, 1)] * 5]
    chosen = torch.cat([torch.arange(start, start + count) for start, count in rows])
    assert torch.equal(run_attention(quantized, (q, k, v), rows, table), expected[chosen])


def test_image_tokens_attend_to_rounded_keys_and_values() -> None:
    torch.manual_seed(0)
    shape = replace(test_image_attention.SHAPE, dtype=torch.float32)
    heads = torch.randn(3, test_image_attention.NUM_TOKENS, 8, 16)
    stored = torch.cat((heads[:, :, :4], rounded(heads[:, :, 4:])), dim=2)
    expected = test_image_attention.outputs(test_image_attention.attention(TorchAttention), stored, 0, 46)
    pools = [torch.zeros(len(layers), 2, 13, 2, 4, 18, dtype=torch.int8) for layers in shape.groups]
    attention = _image_attention.build(_mixed.build(TorchAttention, shape, pools), shape, pools)
    assert torch.equal(test_image_attention.outputs(attention, heads, 0, 46), expected)
