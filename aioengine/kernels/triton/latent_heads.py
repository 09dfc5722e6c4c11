"""Inputs of latent attention on a GPU, in one pass: the key of each token and the rotated part of its queries.

T tokens, H query heads, V latent size, N plain and P rotated elements of a query, E = V + P, B pages, S page size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options
from aioengine.kernels.triton.rows import rms_normed

if TYPE_CHECKING:
    from torch import Tensor

    Norm = tuple[Tensor, Tensor]

HEADS = 16  # query heads per program


@triton.jit
def _rotated(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of the vectors at ``offsets`` [Y, 1], rotated by cos and sin of the token."""
    columns = tl.arange(0, COLUMNS)[None, :]
    is_column = columns < HALF
    cosine = tl.load(cos + columns, mask=is_column, other=0.0)
    sine = tl.load(sin + HALF + columns, mask=is_column, other=0.0)
    low = tl.load(x + offsets + columns, mask=inside, other=0.0)
    high = tl.load(x + offsets + HALF + columns, mask=inside, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = (wide_low * cosine - wide_high * sine).to(low.dtype)
    return turned_low, (wide_high * cosine + wide_low * sine).to(low.dtype)


@triton.jit
def _store_queries(
    source: tl.tensor,
    target: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    is_head: tl.tensor,
    OUT_HEAD: tl.constexpr,
    QUERY_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIED: tl.constexpr,
) -> None:
    """Store the rotated part of the heads at ``source`` [Y, 1], and with ``COPIED`` also the plain part."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_head & (columns < HALF)
    first = QUERY_SIZE - 2 * HALF
    low, high = _rotated(source, cos, sin, first, inside, HALF, COLUMNS)
    places = target + OUT_HEAD - 2 * HALF + columns
    tl.store(places, low, mask=inside)
    tl.store(places + HALF, high, mask=inside)
    if COPIED:
        plain = tl.arange(0, COPIED)[None, :]
        is_plain = is_head & (plain < first)
        tl.store(target + plain, tl.load(source + plain, mask=is_plain, other=0.0), mask=is_plain)


@triton.jit
def _store_key(
    target: tl.tensor,
    latent: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Store the normalized latent vector and both halves of the rotated part."""
    values = tl.arange(0, latent.shape[0])
    columns = tl.arange(0, low.shape[1])[None, :]
    tl.store(target + values, latent, mask=values < VALUE_SIZE)
    tl.store(target + VALUE_SIZE + columns, low, mask=columns < HALF)
    tl.store(target + VALUE_SIZE + HALF + columns, high, mask=columns < HALF)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _heads_kernel(
    q: tl.tensor,
    latents: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    heads: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    Q_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    QUERY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIED: tl.constexpr,
    HEADS: tl.constexpr,
    KEEPS: tl.constexpr,
    WRITES: tl.constexpr,
) -> None:
    KEY_SIZE: tl.constexpr = VALUE_SIZE + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos + token * (2 * HALF), sin + token * (2 * HALF)
    target = heads + token * OUT_STRIDE
    if tl.program_id(1) > 0:
        start_next_and_wait()
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        _store_queries(
            *(q + token * Q_STRIDE + head * QUERY_SIZE, target + head * OUT_HEAD, cos, sin, head < NUM_HEADS),
            *(OUT_HEAD, QUERY_SIZE, HALF, COLUMNS, COPIED),
        )
    else:
        values = tl.arange(0, VALUE_COLUMNS)
        is_value = values < VALUE_SIZE
        scale = tl.load(weight + values, mask=is_value, other=0.0)
        least = tl.load(epsilon)
        start_next_and_wait()
        latent = tl.load(latents + token * LATENT_STRIDE + values, mask=is_value, other=0.0)
        normed = rms_normed(latent, scale, VALUE_SIZE, least, False)
        # names differ from the other branch, because Triton merges variables of both branches
        place = tl.zeros((1, 1), tl.int64) + token * LATENT_STRIDE + VALUE_SIZE
        columns = tl.arange(0, COLUMNS)[None, :]
        key_low, key_high = _rotated(latents, cos, sin, place, columns < HALF, HALF, COLUMNS)
        if KEEPS:
            _store_key(target + NUM_HEADS * OUT_HEAD, normed, key_low, key_high, VALUE_SIZE, HALF)
        if WRITES:
            slot = keys + tl.load(slots + token).to(tl.int64) * KEY_SIZE
            _store_key(slot, normed, key_low, key_high, VALUE_SIZE, HALF)


_heads = KernelLauncher(_heads_kernel)


class _Out(NamedTuple):
    """The outputs.

    Attributes:
        heads: any token stride. The rotated part of a query is at the end of its head.
        copies: also write the plain part of queries. keeps: also write the key, as the last head.
        pages: slots [T] of the keys [B, 1, S, E] to which keys are written; None: no such tensor.
    """

    heads: Tensor
    copies: bool
    keeps: bool
    pages: tuple[Tensor, Tensor] | None


def _launch(q: Tensor, latents: Tensor, out: _Out, *, norm: Norm, tables: tuple[Tensor, Tensor]) -> None:
    """Launch the kernel for q [T, H, N + P] and latents [T, V + P]; other arguments as in ``rotate``."""
    num_tokens, num_heads, query_size = q.shape
    value_size = norm[0].shape[0]
    half = (latents.shape[1] - value_size) // 2
    slots, keys = out.pages or (tables[0], out.heads)
    copied = next_power_of_2(query_size - 2 * half) if out.copies else 0
    sizes = (
        *(q.stride(0), latents.stride(0), *out.heads.stride()[:2], num_heads, query_size, value_size, half),
        *(next_power_of_2(value_size), next_power_of_2(half), copied, HEADS),
        *(out.keeps, out.pages is not None),
    )
    tensors = q, latents, *norm, *tables, out.heads, slots, keys
    key = q.dtype, keys.dtype, slots.dtype, sizes, *alignments(q, latents, norm[0], out.heads, keys)
    grid = num_tokens, -(-num_heads // HEADS) + 1, 1
    _heads(grid, key, (*tensors, *sizes), options(4))


def rotate(
    q: Tensor,
    latents: Tensor,
    heads: Tensor,
    *,
    norm: Norm,
    tables: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor] | None,
) -> None:
    """See ``kernels.latent_heads``: q [T, H, N + P] and latents [T, V + P] -> contiguous heads [T, H + 1, E].

    norm: weight [V] and epsilon []. target: slots [T] of the keys [B, 1, S, E] to which keys are written too.
    """
    _launch(q, latents, _Out(heads, copies=False, keeps=True, pages=target), norm=norm, tables=tables)


def rotate_queries(
    q: Tensor,
    latents: Tensor,
    out: Tensor,
    *,
    norm: Norm,
    tables: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
) -> None:
    """Rotate the last P elements of q [T, H, N + P] into ``out`` [T, H, N + P], which may be q itself."""
    copies = out.data_ptr() != q.data_ptr()
    _launch(q, latents, _Out(out, copies=copies, keeps=False, pages=target), norm=norm, tables=tables)
