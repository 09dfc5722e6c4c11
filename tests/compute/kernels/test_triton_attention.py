"""Attention kernels, and kernels that rotate heads and write pages, match torch in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

torch.Tensor.pin_memory = lambda self: self

import triton.language as tl

from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.attention import triton as triton_attention
from aioengine.attention._gpu_rows import AttentionLayers
from aioengine.kernels.heads import RotaryTables, rotate_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton import attention as attention_kernels
from aioengine.kernels.triton.heads import rotate
from tests.compute.stepping import make_batch, write_and_attend

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, NUM_PAGES = 4, 2, 40, 16, 100
# few even splits, so that short rows have splits of all sizes
attention_kernels.EVEN_SPLITS, attention_kernels.PER_DOUBLING = tl.constexpr(4), tl.constexpr(2)
torch.manual_seed(0)


def some_heads(num_tokens, num_heads=HEADS + 2 * KV_HEADS):
    return torch.randn(num_tokens, num_heads, HEAD_SIZE)


def check(
    rows, num_heads, num_kv_heads, value_size=None, window=None, soft_cap=None, has_sinks=False, batch_invariant=True
):
    shape = AttentionShape(
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        value_size=value_size,
        windows=(window,),
        soft_cap=soft_cap,
        sinks=(torch.randn(num_heads) * 3,) if has_sinks else (),
        batch_invariant=batch_invariant,
    )
    pool = torch.randn(kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE))
    expected_pool = pool.clone()
    order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    tables = [[order.pop() for _ in range(-(-(start + count) // PAGE_SIZE))] for start, count in rows]
    batch = make_batch(rows, tables, PAGE_SIZE)
    heads = some_heads(len(batch.slot_mapping), num_heads + shape.num_sides * num_kv_heads)
    q, k, *v = heads.split((num_heads,) + (num_kv_heads,) * shape.num_sides, dim=1)
    v = v[0] if v else k[..., :value_size]
    backend, reference = triton_attention.build(shape, pool), TorchAttention(shape, expected_pool)
    backend.prepare(batch)
    reference.prepare(batch)
    result, expected = write_and_attend(backend, q, k, v, 0), write_and_attend(reference, q, k, v, 0)
    assert torch.equal(pool, expected_pool), rows
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


starts = [0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536]
for length in range(1, 2049):
    assert attention_kernels.num_splits(length, 64) == sum(start < length for start in starts), length
# two programs per row and kv head if there are many short rows, more if a row may be long
layers = AttentionLayers(
    AttentionShape(num_layers=1, num_heads=32, num_kv_heads=8, head_size=128, scale=1.0),
    [torch.zeros(2, 1, 8, PAGE_SIZE, 128).unbind(0)],
    [],
)
cases = (1, 96), (4, 3), (32, 4), (32, 96), (127, 96), (128, 96)
counts = [triton_attention.choose_num_programs(layers, *case) for case in cases]
assert counts == [32, 3, 2, 8, 8, 2], counts
for rows in ([(0, 1), (15, 1), (300, 1), (127, 1), (900, 1)], [(0, 70)], [(40, 1), (0, 33), (280, 5)]):
    check(rows, HEADS, KV_HEADS)
for rows in ([(15, 1), (300, 1)], [(40, 1), (0, 3)]):
    check(rows, 71, 1)  # one token has more heads than a tile has rows
for rows in ([(15, 1), (300, 1)], [(0, 9), (280, 5)]):
    for num_heads, value_size in ((6, 24), (20, 32)):  # with 20 heads, one token exceeds a tile
        check(rows, num_heads, 1, value_size, batch_invariant=num_heads == 6)
rules = (100, None, False), (1, None, True), (None, 0.7, True), (333, 5.0, True)
for window, soft_cap, has_sinks in rules:
    for rows in ([(0, 1), (15, 1), (300, 1), (127, 1), (900, 1)], [(40, 1), (0, 33), (280, 70)]):
        check(rows, HEADS, KV_HEADS, window=window, soft_cap=soft_cap, has_sinks=has_sinks)

triton_attention.ENOUGH_PROGRAMS, triton_attention.MAX_ALONE = 4, 200  # one program computes a short row
check([(0, 1), (15, 1), (300, 1), (127, 1), (900, 1)], HEADS, KV_HEADS)

heads, angles = some_heads(5), torch.randn(5, 1, HEAD_SIZE // 2)
tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
slots = torch.tensor([16, 17, 5, 95, 40], dtype=torch.int32)
for norms in (None, (torch.randn(HEAD_SIZE), torch.randn(HEAD_SIZE), torch.tensor(1e-6))):
    pools = [torch.randn(6, KV_HEADS, PAGE_SIZE, HEAD_SIZE) for _ in range(2)]
    expected_pools = [split.clone() for split in pools]
    expected = torch.empty_like(heads)
    target = KVTarget(slots, *expected_pools, expected)
    rotate_heads(heads.clone(), HEADS, tables, norms, target)
    for out in (None, torch.empty_like(heads)):
        rotated = heads.clone()
        result = rotated if out is None else out
        for pool in pools:
            pool.copy_(expected_pools[0] * 0 + 7)
        rotate(rotated, HEADS, tables.pairs, norms, target=KVTarget(slots, *pools, out))
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        is_written = torch.zeros(6, PAGE_SIZE, dtype=torch.bool)
        is_written.view(-1)[slots.long()] = True
        for pool, wanted in zip(pools, expected_pools, strict=True):
            pool, wanted = pool.transpose(1, 2), wanted.transpose(1, 2)
            torch.testing.assert_close(pool[is_written], wanted[is_written], rtol=1e-4, atol=1e-5)
            assert (pool[~is_written] == 7).all()
        assert out is None or torch.equal(rotated, heads)
    rotated = heads.clone()
    rotate(rotated, HEADS, tables.pairs, norms)
    torch.testing.assert_close(rotated, expected, rtol=1e-4, atol=1e-5)

from aioengine.kernels import head_linear, latent_heads
from aioengine.kernels.triton import invariant_linear
from aioengine.kernels.triton import latent_heads as triton_latent_heads

weight = torch.randn(3, 70, 40)
for weights in (weight, weight.transpose(1, 2)):
    x, outs = torch.randn(37, 3, weights.shape[1] + 4)[..., 4:], torch.zeros(2, 37, 4, weights.shape[2])
    head_linear.reference(x, weights, outs[0][:, :-1])
    invariant_linear.head_matmul(x, weights, outs[1][:, :-1])
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)

for value_size, rotated_size, num_heads in ((24, 12, 3), (32, 8, 17)):
    q, both = torch.randn(5, num_heads, 10 + rotated_size), torch.randn(5, value_size + rotated_size + 6)
    latents, norm = both[:, 6:], (torch.randn(value_size), torch.tensor(1e-6))
    angles = torch.randn(5, 1, rotated_size // 2)
    tables = RotaryTables(torch.cat((angles.cos(), angles.sin()), 1))
    keys = torch.full((6, 1, PAGE_SIZE, latents.shape[1]), 7.0)
    wanted_keys = keys.clone()
    result, wanted = torch.zeros(2, 5, num_heads + 1, latents.shape[1])
    target = KVTarget(slots, wanted_keys, wanted_keys[..., :value_size])
    latent_heads.latent_heads(q, latents, wanted, norm=norm, tables=tables, target=target)
    triton_latent_heads.rotate(q, latents, result, norm=norm, rotation=tables.pairs, target=KVTarget(slots, keys, keys))
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys, wanted_keys, rtol=1e-4, atol=1e-5)
    assert (keys.view(-1, latents.shape[1])[slots.long()] != 7).all()
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)
