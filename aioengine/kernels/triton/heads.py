"""Norm and rotation of heads, and the write of K and V to their pages, in one pass on a GPU.

A program has ``HEADS`` heads of one token.

T tokens, H query heads, K kv heads, E head size, N pages, S page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import FP8_MAX as LARGEST
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.dependent import wait_between_products
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options

HEADS = tl.constexpr(8)  # per program
FP8_MAX = tl.constexpr(LARGEST)


@triton.jit
def load_halves(pointers: tl.tensor, inside: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Load from pointers to the first halves of heads, and from the same places of the second halves."""
    return tl.load(pointers, mask=inside, other=0.0), tl.load(pointers + HALF, mask=inside, other=0.0)


@triton.jit
def store_halves(pointers: tl.tensor, low: tl.tensor, high: tl.tensor, inside: tl.tensor, HALF: tl.constexpr) -> None:
    """Undo ``load_halves``."""
    tl.store(pointers, low, mask=inside)
    tl.store(pointers + HALF, high, mask=inside)


@triton.jit
def rotated(low: tl.tensor, high: tl.tensor, rotation: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Rotate both halves [heads, columns] by cos and sin of the token, [2, HALF]."""
    columns = tl.arange(0, low.shape[1])
    inside = columns < HALF
    cosine = tl.load(rotation + columns, mask=inside, other=0.0)[None, :]
    sine = tl.load(rotation + HALF + columns, mask=inside, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = (wide_low * cosine - wide_high * sine).to(low.dtype)
    return turned_low, (wide_high * cosine + wide_low * sine).to(low.dtype)


@triton.jit
def _stored(numbers: tl.tensor, pool: tl.tensor, scales: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Convert numbers for the pool as ``kernels.kv_target.to_stored``. SIDE: index of the scale in ``scales``."""
    if pool.dtype.element_ty.is_fp8():
        numbers = numbers.to(tl.float32)
        if scales is not None:
            numbers = tl.div_rn(numbers, tl.load(scales + SIDE))
        is_finite = tl.abs(numbers) < float("inf")
        numbers = tl.where(is_finite, tl.clamp(numbers, -FP8_MAX, FP8_MAX), float("nan"))
    return numbers.to(pool.dtype.element_ty)


@kernel(do_not_specialize_on_alignment=["slots"])
def _rotate_kernel(
    heads: tl.tensor, token_stride: tl.tensor, rotation: tl.tensor, query_weight: tl.tensor, key_weight: tl.tensor,
    epsilon: tl.tensor, slots: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, scales: tl.tensor,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``rotate`` for some heads of a token. COLUMNS: ``HALF``, padded."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, COLUMNS)
    is_column = columns < HALF
    is_rotated = head < NUM_QUERY + NUM_KV
    inside = (is_rotated if slots is None else (head < NUM_QUERY + 2 * NUM_KV)) & is_column[None, :]
    pointers = heads + token * token_stride + head * (2 * HALF) + columns[None, :]
    if query_weight is not None:  # the weights are constant, so they need not wait for the previous kernel
        query_low, query_high = load_halves(query_weight + columns, is_column, HALF)
        key_low, key_high = load_halves(key_weight + columns, is_column, HALF)
        weight_low = tl.where(head < NUM_QUERY, query_low[None, :], key_low[None, :])
        weight_high = tl.where(head < NUM_QUERY, query_high[None, :], key_high[None, :])
        least = tl.load(epsilon)
    wait_between_products()
    low, high = load_halves(pointers, inside, HALF)
    value_low, value_high = low, high
    if query_weight is not None:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        mean = (tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)) / (2 * HALF)
        inverse = (1.0 / tl.sqrt_rn(mean + least))[:, None]
        normed_low, normed_high = wide_low * inverse, wide_high * inverse
        if weight_low.dtype != tl.float32:  # an fp32 weight is multiplied before rounding
            normed_low, normed_high = normed_low.to(low.dtype), normed_high.to(low.dtype)
        low, high = (normed_low * weight_low).to(low.dtype), (normed_high * weight_high).to(low.dtype)
    low, high = rotated(low, high, rotation + token * (2 * HALF), HALF)
    is_rotated_here = inside & is_rotated
    if slots is not None:
        slot = tl.load(slots + token).to(tl.int64)
        kv_head = tl.where(is_rotated, head, head - NUM_KV) - NUM_QUERY
        target = ((slot // PAGE_SIZE * NUM_KV + kv_head) * PAGE_SIZE + slot % PAGE_SIZE) * (2 * HALF) + columns[None, :]
        is_key = is_rotated_here & (head >= NUM_QUERY)
        is_value = inside & (head >= NUM_QUERY + NUM_KV)
        store_halves(keys + target, _stored(low, keys, scales, 0), _stored(high, keys, scales, 0), is_key, HALF)
        value_halves = _stored(value_low, values, scales, 1), _stored(value_high, values, scales, 1)
        store_halves(values + target, value_halves[0], value_halves[1], is_value, HALF)
    if out is not None:
        moved = out + token * ((NUM_QUERY + 2 * NUM_KV) * 2 * HALF) + head * (2 * HALF) + columns[None, :]
        low, high = tl.where(is_rotated, low, value_low), tl.where(is_rotated, high, value_high)
        store_halves(moved, low, high, inside, HALF)
    else:
        store_halves(pointers, low, high, is_rotated_here, HALF)


@kernel(do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    queries: tl.tensor, query_token: tl.tensor, query_head: tl.tensor, new_keys: tl.tensor, key_token: tl.tensor,
    key_head: tl.tensor, new_values: tl.tensor, value_token: tl.tensor, value_head: tl.tensor, slots: tl.tensor,
    keys: tl.tensor, values: tl.tensor, out: tl.tensor, scales: tl.tensor,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``write`` for some heads of a token: queries, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    if out is None:
        head += NUM_QUERY
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (head < NUM_QUERY + 2 * NUM_KV) & (columns < SIZE)
    is_query = inside & (head < NUM_QUERY)
    is_value = inside & (head >= NUM_QUERY + NUM_KV)
    is_key = inside & (head >= NUM_QUERY) & (head < NUM_QUERY + NUM_KV)
    kv_head = head - NUM_QUERY
    kv_head = tl.where(kv_head < NUM_KV, kv_head, kv_head - NUM_KV)
    wait_between_products()
    slot = tl.load(slots + token).to(tl.int64)
    target = ((slot // PAGE_SIZE * NUM_KV + kv_head) * PAGE_SIZE + slot % PAGE_SIZE) * SIZE + columns
    key = tl.load(new_keys + token * key_token + kv_head * key_head + columns, mask=is_key, other=0.0)
    value = tl.load(new_values + token * value_token + kv_head * value_head + columns, mask=is_value, other=0.0)
    tl.store(keys + target, _stored(key, keys, scales, 0), mask=is_key)
    tl.store(values + target, _stored(value, values, scales, 1), mask=is_value)
    if out is not None:
        moved = out + (token * (NUM_QUERY + 2 * NUM_KV) + head) * SIZE + columns
        query = tl.load(queries + token * query_token + head * query_head + columns, mask=is_query, other=0.0)
        tl.store(moved, tl.where(is_query, query, tl.where(is_key, key, value)), mask=inside)


@triton.jit
def _rounded(wide: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Round to the dtype of ``like``, and convert back to fp32."""
    return wide.to(like.dtype).to(tl.float32)


@kernel()
def _rotate_qk_kernel(
    queries: tl.tensor, query_token: tl.tensor, query_head: tl.tensor, keys: tl.tensor, key_token: tl.tensor,
    key_head: tl.tensor, cos: tl.tensor, sin: tl.tensor, out_queries: tl.tensor, out_keys: tl.tensor,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``rotate_qk`` for some heads of a token. Each product is rounded before it is added."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    is_query = (head < NUM_QUERY) & (columns < HALF)
    is_key = (head >= NUM_QUERY) & (head < NUM_QUERY + NUM_KV) & (columns < HALF)
    key_index = head - NUM_QUERY
    wait_between_products()
    query = queries + token * query_token + head * query_head + columns
    key = keys + token * key_token + key_index * key_head + columns
    low = tl.where(is_query, tl.load(query, mask=is_query), tl.load(key, mask=is_key))
    high = tl.where(is_query, tl.load(query + HALF, mask=is_query), tl.load(key + HALF, mask=is_key))
    inside = columns < HALF
    table = token * (2 * HALF) + columns
    cos_low, cos_high = load_halves(cos + table, inside, HALF)
    sin_low, sin_high = load_halves(sin + table, inside, HALF)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = _rounded(wide_low * cos_low, low) - _rounded(wide_high * sin_low, low)
    turned_high = _rounded(wide_high * cos_high, low) + _rounded(wide_low * sin_high, low)
    out_query = out_queries + (token * NUM_QUERY + head) * (2 * HALF) + columns
    out_key = out_keys + (token * NUM_KV + key_index) * (2 * HALF) + columns
    turned_low, turned_high = turned_low.to(low.dtype), turned_high.to(low.dtype)
    store_halves(out_query, turned_low, turned_high, is_query, HALF)
    store_halves(out_key, turned_low, turned_high, is_key, HALF)


def rotate(
    heads: Tensor,
    num_query: int,
    rotation: Tensor,
    norms: tuple[Tensor, Tensor, Tensor] | None,
    *,
    target: KVTarget | None = None,
) -> None:
    """Normalize and rotate the query and key heads of [T, H + 2 K, E] in place. Value heads are unchanged.

    rotation: ``RotaryTables.pairs`` [T, 2, E / 2].
    norms: weights of query and key heads, and epsilon.
    target: keys and values are written there too. If it has ``KVTarget.heads``, ``heads`` is not changed.
    """
    num_tokens, num_heads, head_size = heads.shape
    num_kv = (num_heads - num_query) // 2
    stride, half = heads.stride(0), head_size // 2
    slots, keys, values, out, scales = (None,) * 5 if target is None else target
    sizes = num_query, num_kv, half, next_power_of_2(half), 1 if keys is None else keys.shape[2]
    key = *dtypes(heads, norms and norms[0], slots, keys), stride, sizes, *alignments(heads, out, scales)
    arguments = heads, stride, rotation, *(norms or (None,) * 3), slots, keys, values, out, scales, *sizes
    grid = num_tokens, -(-(num_heads if target else num_query + num_kv) // HEADS.value), 1
    _rotate_kernel(grid, key, arguments, options(4))


def write(q: Tensor, k: Tensor, v: Tensor, target: KVTarget) -> None:
    """Write q [T, H, E], k and v [T, K, E] to the target. The elements of a head are adjacent."""
    (num_tokens, num_query, size), num_kv = q.shape, k.shape[1]
    slots, keys, values, out, scales = target
    strides = [x.stride(dim) for x in (q, k, v) for dim in (0, 1)]
    sizes = num_query, num_kv, size, next_power_of_2(size), keys.shape[2]
    arguments = (q, *strides[:2], k, *strides[2:4], v, *strides[4:], slots, keys, values, out, scales, *sizes)
    key = (*dtypes(q, keys, slots), sizes, _forms((q, k, v, out, scales), strides))
    num_moved = 2 * num_kv if out is None else num_query + 2 * num_kv
    _write_kernel((num_tokens, -(-num_moved // HEADS.value), 1), key, arguments, options(4))


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, E] and k [T, K, E] by cos and sin [T, E] into contiguous results. Elements of a head are
    adjacent.
    """
    (num_tokens, num_query, size), num_kv = q.shape, k.shape[1]
    cos, sin = cos.contiguous(), sin.contiguous()
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    strides = [x.stride(dim) for x in (q, k) for dim in (0, 1)]
    sizes = num_query, num_kv, size // 2, next_power_of_2(size // 2)
    arguments = (q, *strides[:2], k, *strides[2:], cos, sin, out_q, out_k, *sizes)
    key = (q.dtype, sizes, _forms((q, k, cos, sin), strides))
    grid = num_tokens, -(-(num_query + num_kv) // HEADS.value), 1
    _rotate_qk_kernel(grid, key, arguments, options(4, fuses=False))
    return out_q, out_k


def _forms(tensors: tuple[Tensor | None, ...], strides: list[int]) -> tuple[object, ...]:
    """Return the properties of tensors [...] and strides for which Triton compiles separate specializations."""
    wide = tuple(stride > (1 << 31) - 1 for stride in strides)
    return (*alignments(*tensors), *((stride % 16 == 0, stride == 1) for stride in strides), wide)
