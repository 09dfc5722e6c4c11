"""What stands around latent attention of a few rows of one token, on a GPU: two kernels instead of four or five.

Before it, a program multiplies a head's queries with a part of its expansion, of which it reads its share while the
kernel before is still at work; others rotate, norm and write the keys. Behind it, a program merges the parts of a row
and head and multiplies with its values.

R rows, H query heads, N and P numbers of a query head that are not and that are rotated, V latent size, E = V + P key
size, O value size of a head, B pages of the pool, S page size, X parts of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aioengine.kernels.triton.attention import MASKED
from aioengine.kernels.triton.latent_decode import part_size
from aioengine.kernels.triton.launcher import Launcher, has_dependent_launch, next_power_of_2, options

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.attention import Rows
    from aioengine.kernels.triton.latent_decode import Parts

    Norm = tuple[Tensor, Tensor]

ROWS = 16
"""Rows of a program that multiplies queries: the fewest that a matrix product takes."""
COLUMNS = 128
"""Numbers of a latent vector that it computes."""
OUTPUTS = 32
"""Numbers of a value that a program computes."""
PARTS = 16
"""Parts that it merges at a time."""


@triton.jit
def _turned(
    pointers: tl.tensor, cos: tl.tensor, sin: tl.tensor, inside: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves at ``pointers``, rotated; ``cos`` and ``sin``: where those of the rows are."""
    cosine = tl.load(cos, mask=inside, other=0.0)
    sine = tl.load(sin + HALF, mask=inside, other=0.0)
    low = tl.load(pointers, mask=inside, other=0.0)
    high = tl.load(pointers + HALF, mask=inside, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = (wide_low * cosine - wide_high * sine).to(low.dtype)
    return turned_low, (wide_high * cosine + wide_low * sine).to(low.dtype)


@triton.jit
def _write_keys(
    latents: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    is_row: tl.tensor,
    is_half: tl.tensor,
    half: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """The keys of rows to their slots. ``latents`` and ``slots``: where those of the rows are."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_row & (columns < VALUE_SIZE)
    factor = tl.load(weight + columns, mask=columns < VALUE_SIZE, other=0.0)
    least = tl.load(epsilon)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    latent = tl.load(latents + columns, mask=inside, other=0.0)
    wide = latent.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1)[:, None] / VALUE_SIZE + least)
    places = keys + tl.load(slots, mask=is_row, other=0).to(tl.int64) * (VALUE_SIZE + 2 * HALF)
    tl.store(places + columns, (wide * inverse).to(latent.dtype) * factor, mask=inside)
    low, high = _turned(latents + VALUE_SIZE + half, cos, sin, is_half, HALF)
    tl.store(places + VALUE_SIZE + half, low, mask=is_half)
    tl.store(places + VALUE_SIZE + HALF + half, high, mask=is_half)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots"])
def _absorb_kernel(
    q: tl.tensor,
    latents: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    expansion: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    Q_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    HALF: tl.constexpr,
    EXPANDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PLAIN_COLUMNS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    SHARES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = rows < num_rows
    half = tl.arange(0, HALF_COLUMNS)[None, :]
    is_half = is_row & (half < HALF)
    cos += rows * (2 * HALF) + half
    sin += rows * (2 * HALF) + half
    index = tl.program_id(0)
    if index < NUM_HEADS * SHARES:
        head = index // SHARES
        columns = index % SHARES * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        plain = tl.arange(0, PLAIN_COLUMNS)
        sources = expansion + (head * EXPANDED + plain)[:, None] * VALUE_SIZE + columns
        share = tl.load(sources, mask=(plain < PLAIN)[:, None] & (columns < VALUE_SIZE), other=0.0)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        pointers = q + rows.to(tl.int64) * Q_STRIDE + head * (PLAIN + 2 * HALF)
        vectors = tl.load(pointers + plain[None, :], mask=is_row & (plain < PLAIN)[None, :], other=0.0)
        found = tl.dot(vectors, share, input_precision="ieee").to(out.dtype.element_ty)
        tl.store(out + (rows * NUM_HEADS + head) * VALUE_SIZE + columns, found, mask=is_row & (columns < VALUE_SIZE))
        if index % SHARES == 0:
            low, high = _turned(pointers + PLAIN + half, cos, sin, is_half, HALF)
            tl.store(pointers + PLAIN + half, low, mask=is_half)
            tl.store(pointers + PLAIN + HALF + half, high, mask=is_half)
    else:
        _write_keys(
            *(latents + rows.to(tl.int64) * LATENT_STRIDE, weight, epsilon, cos, sin, slots + rows, keys),
            *(is_row, is_half, half, VALUE_SIZE, HALF, VALUE_COLUMNS, DEPENDENT),
        )


@triton.jit(
    do_not_specialize=["few_parts", "most_parts"], do_not_specialize_on_alignment=["page_starts", "last_lengths"]
)
def _values_kernel(
    part_sums: tl.tensor,
    part_marks: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    expansion: tl.tensor,
    out: tl.tensor,
    few_parts: tl.tensor,
    most_parts: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PLAIN: tl.constexpr,
    OUTPUT_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < OUTPUT_SIZE
    columns = tl.arange(0, COLUMNS)[None, :]
    is_column = columns < VALUE_SIZE
    lines = expansion + ((head * (PLAIN + OUTPUT_SIZE) + PLAIN + outputs) * VALUE_SIZE)[:, None]
    share = tl.load(lines + columns, mask=is_output[:, None] & is_column, other=0.0)
    num_pages = tl.load(page_starts + row + 1) - tl.load(page_starts + row)
    length = (num_pages - 1) * PAGE_SIZE + tl.load(last_lengths + row)
    size = part_size(length, few_parts, most_parts, BLOCK)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    highest = tl.full((), MASKED, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    merged = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, tl.cdiv(length, size), PARTS):
        parts = first + tl.arange(0, PARTS)
        is_part = parts * size < length
        sources = (row * most_parts + parts) * NUM_HEADS + head
        marks = tl.load(part_marks + 2 * sources, mask=is_part, other=MASKED)
        totals = tl.load(part_marks + 2 * sources + 1, mask=is_part, other=0.0)
        pointers = part_sums + (sources * VALUE_SIZE)[:, None] + columns
        sums = tl.load(pointers, mask=is_part[:, None] & is_column, other=0.0)
        higher = tl.maximum(highest, tl.max(marks, 0))
        weights = tl.exp2(marks - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(totals * weights, 0)
        merged = merged * shrink + tl.sum(sums * weights[:, None], 0)
        highest = higher
    merged = (merged / total).to(share.dtype).to(tl.float32)
    found = tl.sum(share.to(tl.float32) * merged[None, :], 1)
    places = out + (row * NUM_HEADS + head) * OUTPUT_SIZE + outputs
    tl.store(places, found.to(out.dtype.element_ty), mask=is_output)


_absorb = Launcher(_absorb_kernel)
_values = Launcher(_values_kernel)


def absorb(
    q: Tensor,
    latents: Tensor,
    expansion: Tensor,
    out: Tensor,
    *,
    norm: Norm,
    tables: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
) -> None:
    """Of q [R, H, N + P], the last P numbers are rotated in place, and the others times expansion [H, N + O, V] go to
    ``out`` [R, H, V]; the keys of latents [R, V + P] go to their pages. Other arguments: see ``kernels.latent_heads``.
    """
    num_rows, num_heads, size = q.shape
    value_size = norm[0].shape[0]
    half = (latents.shape[1] - value_size) // 2
    plain = size - 2 * half
    sizes = (
        *(q.stride(0), latents.stride(0), num_heads, plain, half, expansion.shape[1], value_size),
        *(max(next_power_of_2(plain), 16), next_power_of_2(half), next_power_of_2(value_size), COLUMNS, ROWS),
        has_dependent_launch(),
    )
    slots, keys = target
    tensors = q, latents, *norm, *tables, slots, keys, expansion, out
    alignments = tuple(tensor.data_ptr() % 16 for tensor in (q, latents, norm[0], keys, expansion, out))
    grid = num_heads * -(-value_size // COLUMNS) + 1, -(-num_rows // ROWS), 1
    _absorb(grid, (q.dtype, slots.dtype, sizes, alignments), (*tensors, num_rows, *sizes), options(4))


def values(
    found: tuple[Tensor, Tensor],
    rows: Rows,
    parts: Parts,
    expansion: Tensor,
    *,
    out: Tensor,
    page_size: int,
    block: int,
) -> None:
    """Parts of R rows, merged and times expansion [H, N + O, V], into ``out`` [R, H, O].

    Args:
        found: what ``latent_decode.attend_parts`` returns.
        block: of the positions of a part, as the tile of ``latent_decode`` has it.
    """
    sums, marks = found
    num_rows, num_heads, output_size = out.shape
    value_size = sums.shape[3]
    sizes = (
        *(num_heads, page_size, expansion.shape[1] - output_size, output_size, value_size, PARTS),
        *(next_power_of_2(value_size), OUTPUTS, block, has_dependent_launch()),
    )
    tensors = sums, marks, rows.page_starts, rows.last_lengths, expansion, out
    key = out.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in (sums, marks, expansion, out))
    grid = -(-output_size // OUTPUTS), num_heads, num_rows
    _values(grid, key, (*tensors, *parts, *sizes), options(4))
