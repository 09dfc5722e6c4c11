"""Inputs of latent attention on a GPU, in one pass: the key of each token and the rotated part of its queries.

The first program of a token computes its key, the others ``HEADS`` query heads each.

T tokens, H query heads, V latent size, N plain and P rotated elements of a query, E = V + P, B pages, S page size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.heads import load_halves, rotated, store_halves
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.norms import rms_normed

Norm = tuple[Tensor, Tensor]

HEADS = tl.constexpr(16)  # query heads per program


@triton.jit
def _store_key(
    target: tl.tensor, latent: tl.tensor, low: tl.tensor, high: tl.tensor, VALUE_SIZE: tl.constexpr, HALF: tl.constexpr
) -> None:
    """Store the normalized latent vector and both halves of the rotated part."""
    values = tl.arange(0, latent.shape[0])
    columns = tl.arange(0, low.shape[1])[None, :]
    tl.store(target + values, latent, mask=values < VALUE_SIZE)
    store_halves(target + VALUE_SIZE + columns, low, high, columns < HALF, HALF)


@kernel(do_not_specialize_on_alignment=["slots"])
def _heads_kernel(
    q: tl.tensor, latents: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, rotation: tl.tensor,
    heads: tl.tensor, slots: tl.tensor, keys: tl.tensor,
    Q_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, QUERY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HALF: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr, COPIED: tl.constexpr, KEEPS_KEY: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the key of a token (first program), or rotate some of its query heads."""
    PLAIN: tl.constexpr = QUERY_SIZE - 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    rotation += token * (2 * HALF)
    target = heads + token * OUT_STRIDE
    columns = tl.arange(0, COLUMNS)[None, :]
    if tl.program_id(1) > 0:
        start_next_and_wait()
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        source, out = q + token * Q_STRIDE + head * QUERY_SIZE, target + head * OUT_HEAD
        inside = (head < NUM_HEADS) & (columns < HALF)
        low, high = load_halves(source + PLAIN + columns, inside, HALF)
        low, high = rotated(low, high, rotation, HALF)
        store_halves(out + OUT_HEAD - 2 * HALF + columns, low, high, inside, HALF)
        if COPIED:  # columns of the plain part
            plain = tl.arange(0, COPIED)[None, :]
            is_plain = (head < NUM_HEADS) & (plain < PLAIN)
            tl.store(out + plain, tl.load(source + plain, mask=is_plain, other=0.0), mask=is_plain)
    else:  # names differ from the other branch, because Triton merges variables of both branches
        values = tl.arange(0, VALUE_COLUMNS)
        is_value, is_column = values < VALUE_SIZE, columns < HALF
        scale = tl.load(weight + values, mask=is_value, other=0.0)
        least = tl.load(epsilon)
        start_next_and_wait()
        own = latents + token * LATENT_STRIDE
        latent = tl.load(own + values, mask=is_value, other=0.0)
        normed = rms_normed(latent, scale, VALUE_SIZE, least)
        key_low, key_high = load_halves(own + VALUE_SIZE + columns, is_column, HALF)
        key_low, key_high = rotated(key_low, key_high, rotation, HALF)
        if KEEPS_KEY:
            _store_key(target + NUM_HEADS * OUT_HEAD, normed, key_low, key_high, VALUE_SIZE, HALF)
        if slots is not None:
            slot = keys + tl.load(slots + token).to(tl.int64) * (VALUE_SIZE + 2 * HALF)
            _store_key(slot, normed, key_low, key_high, VALUE_SIZE, HALF)


def rotate(
    q: Tensor,
    latents: Tensor,
    out: Tensor,
    *,
    norm: Norm,
    rotation: Tensor,
    target: KVTarget | None,
) -> None:
    """Rotate the last P elements of q [T, H, N + P] to the end of each head of ``out``, and compute the keys.

    out: contiguous [T, H + 1, E], where the last head of a token becomes its key (see ``kernels.latent_heads``); or
    [T, H, N + P], any token stride, which also receives the plain elements, and which may be q.
    norm: weight [V] and epsilon []. rotation: ``RotaryTables.pairs`` [T, 2, P / 2].
    target: its keys [B, 1, S, E] are written too.
    """
    num_tokens, num_heads, query_size = q.shape
    value_size = norm[0].shape[0]
    half = (latents.shape[1] - value_size) // 2
    keeps_key = out.shape[1] > num_heads
    copies = not keeps_key and out.data_ptr() != q.data_ptr()
    slots, keys = (None, None) if target is None else target[:2]
    strides = q.stride(0), latents.stride(0), *out.stride()[:2]
    copied = next_power_of_2(query_size - 2 * half) if copies else 0
    columns = next_power_of_2(value_size), next_power_of_2(half), copied
    sizes = (*strides, num_heads, query_size, value_size, half, *columns, keeps_key)
    key = *dtypes(q, slots), sizes, *alignments(q, latents, norm[0], out, keys)
    grid = num_tokens, -(-num_heads // HEADS.value) + 1, 1
    _heads_kernel(grid, key, (q, latents, *norm, rotation, out, slots, keys, *sizes), options(4))
