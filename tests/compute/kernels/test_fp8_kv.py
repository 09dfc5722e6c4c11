"""Kernels that write and read fp8 keys and values: they match torch in Triton's interpreter, and compile for Hopper."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled, run_interpreted

CONVERSIONS = """
import torch
import triton.language as tl
from triton.runtime import interpreter

from aioengine.kernels.codes import FP8

TYPES = {tl.float8e4nv: FP8, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
convert = interpreter._convert_float


def convert_float(x, source, target, rounding):
    # the interpreter's own conversion to fp8 is wrong for NaN, and where rounding changes the exponent
    if tl.float8e4nv not in (source, target):
        return convert(x, source, target, rounding)
    result = torch.frombuffer(bytearray(x.tobytes()), dtype=TYPES[source]).to(TYPES[target])
    return result.view(torch.uint8).numpy().view(f"u{result.itemsize}").reshape(x.shape)


interpreter._convert_float = convert_float
"""
ATTENTION = """
import numpy as np
import torch

torch.Tensor.pin_memory = lambda self: self

import triton.language as tl

from aioengine.attention import triton as triton_attention
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention._gpu_rows import attention_layers
from aioengine.attention._gpu_splits import max_splits, plan_splits
from aioengine.attention.torch import TorchAttention
from aioengine.kernels.codes import FP8
from aioengine.kernels.triton import attention as kernels
from aioengine.kernels.triton import decode
from tests.compute.stepping import make_batch, write_and_attend

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, NUM_PAGES = 4, 2, 64, 16, 100
kernels.EVEN_SPLITS, kernels.PER_DOUBLING = tl.constexpr(4), tl.constexpr(2)  # short rows have several splits
torch.manual_seed(0)
for dtype, scales, rules in (
    (torch.float32, (), {}),
    (torch.bfloat16, (), {"soft_cap": 5.0}),
    (torch.float32, (torch.tensor([0.25, 0.6]),), {"windows": (70,), "soft_cap": 5.0, "sinks": (torch.randn(HEADS),)}),
):
    shape = AttentionShape(
        num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5,
        dtype=dtype, kv_scales=scales, **rules,
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    window = rules.get("windows", (None,))[0]
    for rows in ([(0, 1), (15, 1), (300, 1)], [(0, 70)], [(40, 1), (0, 33), (280, 5)]):
        pool = torch.randn(kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)).to(FP8)
        expected_pool = pool.clone()
        order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
        tables = [[order.pop() for _ in range(-(-(start + count) // PAGE_SIZE))] for start, count in rows]
        batch = make_batch(rows, tables, PAGE_SIZE)
        heads = torch.randn(len(batch.slot_mapping), 8, HEAD_SIZE).to(dtype)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q[0, 0] *= 1e6  # more than fp16 holds
        q[0, 1] = 0.0
        v[0, 0, :3] = torch.tensor([1e6, -1e6, 500.0])
        backend, reference = triton_attention.build(shape, pool), TorchAttention(shape, expected_pool)
        backend.prepare(batch)
        reference.prepare(batch)
        result, expected = write_and_attend(backend, q, k, v, 0), write_and_attend(reference, q, k, v, 0)
        assert torch.equal(pool.view(torch.uint8), expected_pool.view(torch.uint8))
        torch.testing.assert_close(result, expected, **tolerance)
        if max(batch.query_lengths) == 1:
            lengths = np.array(batch.kv_lengths, dtype=np.int32)
            splits = torch.from_numpy(plan_splits(lengths, max_splits(3, KV_HEADS), window))
            starts = torch.tensor([0, *np.cumsum([len(table) for table in tables])], dtype=torch.int32)
            page_ids = torch.tensor(sum(tables, []), dtype=torch.int32)
            step = decode.DecodeRows(starts, page_ids, splits, torch.zeros(3 * KV_HEADS, dtype=torch.int32))
            out = torch.empty(3, HEADS, HEAD_SIZE, dtype=dtype)
            layers = attention_layers(shape, pool)
            layers.decode(q.contiguous(), step, 0, out=out)
            torch.testing.assert_close(out.flatten(1), expected, **tolerance)
"""
FLASHINFER = """
import sys
from types import SimpleNamespace

import numpy as np
import torch

torch.Tensor.pin_memory = lambda self: self
torch.cuda.Event = lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None)


class Packed:
    # FlashInfer's attention over packed keys and values, in torch

    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, query_starts, kv_starts, num_heads, num_kv_heads, head_size, *, causal, sm_scale, window_left, **_):
        assert causal
        self.rows = [*zip(*(zip(starts[:-1], starts[1:]) for starts in (query_starts.tolist(), kv_starts.tolist())))]
        self.scale, self.window, self.group = sm_scale, window_left, num_heads // num_kv_heads
        planned.append(len(self.rows))

    def run(self, q, keys, values, *, out):
        for (first, last), kv in self.rows:
            k, v = (side[slice(*kv)].repeat_interleave(self.group, 1) for side in (keys, values))
            distances = (torch.arange(last - first)[:, None] + len(k) - last + first) - torch.arange(len(k))
            hidden = (distances < 0) | ((distances > self.window) if self.window >= 0 else False)
            scores = torch.einsum("qhe,khe->hqk", q[first:last], k) * self.scale
            out[first:last] = torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


planned = []
wrappers = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=None, BatchPrefillWithRaggedKVCacheWrapper=Packed)
sys.modules["flashinfer"] = wrappers

from aioengine.attention import _flashinfer
from aioengine.attention import flashinfer
from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.kernels.codes import FP8
from tests.compute.stepping import make_batch, write_and_attend

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, NUM_PAGES = 4, 2, 64, 16, 100
_flashinfer.WORKSPACE_BYTES = 1
torch.manual_seed(0)
for window, rows, num_planned in (
    (None, [(40, 1), (0, 200), (30, 60)], [2]),
    (50, [(0, 200), (30, 60)], [2]),
    (None, [(40, 1), (280, 5)], []),  # few tokens
):
    planned.clear()
    shape = AttentionShape(
        num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5,
        dtype=torch.float32, windows=(window,), kv_scales=(torch.tensor([0.25, 0.6]),),
    )
    pool = torch.randn(kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)).to(FP8)
    backend, reference = flashinfer.build(shape, pool), TorchAttention(shape, pool.clone())
    assert type(backend) is flashinfer.FlashInferAttention, "no cascade attention"
    order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    tables = [[order.pop() for _ in range(-(-(start + count) // PAGE_SIZE))] for start, count in rows]
    batch = make_batch(rows, tables, PAGE_SIZE)
    q, k, v = torch.randn(len(batch.slot_mapping), 8, HEAD_SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    backend.prepare(batch)
    reference.prepare(batch)
    result, expected = write_and_attend(backend, q, k, v, 0), write_and_attend(reference, q, k, v, 0)
    assert planned == num_planned
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
"""
WRITES = """
import torch

from aioengine.kernels.clean_pages import clean_pages
from aioengine.kernels.heads import RotaryTables, rotate_heads, write_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.codes import FP8
from aioengine.kernels.triton import pages
from aioengine.kernels.triton import heads as kernels

torch.manual_seed(0)
slots = torch.tensor([9, 3, 4, 8, 11], dtype=torch.int32)
angles = torch.randn(5, 1, 16)
tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
for scales in (None, torch.tensor([0.25, 3.0])):
    heads = torch.randn(5, 8, 32) * 200
    heads[1, 6, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9])
    pools, expected = torch.zeros(2, 2, 3, 2, 4, 32, dtype=FP8)
    rotate_heads(heads.clone(), 4, tables, target=KVTarget(slots, *expected, scales=scales))
    kernels.rotate(heads.clone(), 4, tables.pairs, None, target=KVTarget(slots, *pools, scales=scales))
    assert torch.equal(pools.view(torch.uint8), expected.view(torch.uint8))
    assert pools.float().isnan().sum() == 3
    q, k, v = heads.split((4, 2, 2), dim=1)
    for out in (None, torch.zeros(5, 8, 32)):
        pools, expected = torch.zeros(2, 2, 3, 2, 4, 32, dtype=FP8)
        write_heads(q, k, v, KVTarget(slots, *expected, None if out is None else out.clone(), scales))
        kernels.write(q, k, v, KVTarget(slots, *pools, out, scales))
        assert torch.equal(pools.view(torch.uint8), expected.view(torch.uint8))
        assert out is None or torch.equal(out.nan_to_num(), heads.nan_to_num())
    slots = slots.flip(0)
    keys, values = pages.convert(tuple(pools), slots, torch.float32, scales)
    for result, stored, side in ((keys, pools[0], 0), (values, pools[1], 1)):
        expected = stored[slots.long() // 4, :, slots.long() % 4].float() * (1 if scales is None else scales[side])
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())
pool = torch.randn(3, 2, 9, 2, 16, 32)
pool[torch.rand(pool.shape) < 0.1] = torch.nan
pool = pool.to(FP8)
expected, token_ids = pool.clone(), torch.tensor([5, -1])
rows, page_ids = torch.tensor([[1, 0, 2], [0, 2, 1]], dtype=torch.int32), torch.tensor([4, 7, 1], dtype=torch.int32)
clean_pages(expected, token_ids, rows, page_ids)
pages.clean(pool, token_ids, rows, page_ids)
assert torch.equal(pool.float().nan_to_num(nan=99.0), expected.float().nan_to_num(nan=99.0))
assert pool[:, :, [4, 7]].float().isfinite().all()
assert not pool[:, :, 1].float().isfinite().all()
"""
COMPILES = """
import torch

from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.codes import FP8
from aioengine.kernels.triton import attention, decode, heads, pages
from aioengine.kernels.triton.scores import ScoreRules

ints = torch.zeros(48, dtype=torch.int32)
rows = attention.PagedRows(ints, ints, ints, ints)
step = decode.DecodeRows(ints, ints, torch.zeros(5, 16, dtype=torch.int32), ints)
for scales in (None, torch.zeros(2)):
    rules = ScoreRules(scales=scales)
    for head_size, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (256, torch.float16)):
        q, out = torch.zeros(2, 16, head_size, dtype=dtype)[:, :8], torch.zeros(2, 8, head_size, dtype=dtype)
        pool = torch.zeros(2, 3, 4, 16, head_size, dtype=FP8).unbind(0)
        attention.attend(q, pool, rows, ints[:4].view(2, 2), scale=0.1, out=out, rules=rules)
        attention.attend_splits(q, pool, rows, ints, max_splits=4, num_programs=2, scale=0.1, out=out, rules=rules)
        decode.decode(q, pool, step, scale=0.1, out=out, rules=rules)
        both = torch.zeros(2, 16, head_size, dtype=dtype)
        heads.rotate(both, 8, torch.zeros(2, 2, head_size // 2), None, target=KVTarget(ints[:2], *pool, both, scales))
        pages.convert(pool, ints, dtype, scales)
        heads.write(*both.split((8, 4, 4), dim=1), KVTarget(ints[:2], *pool, both, scales))
failed = torch.zeros(2, dtype=torch.int64)
pages.clean(torch.zeros(1, 2, 3, 4, 16, 64, dtype=FP8), failed, ints[:6].view(2, 3), ints)
"""


@pytest.mark.slow
def test_attention_matches_torch() -> None:
    run_interpreted(CONVERSIONS + ATTENTION)


@pytest.mark.slow
def test_flashinfer_reads_converted_copies() -> None:
    run_interpreted(CONVERSIONS + FLASHINFER)


@pytest.mark.slow
def test_writes_match_torch() -> None:
    run_interpreted(CONVERSIONS + WRITES)


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_compiled(COMPILES)
