"""Changes and copies of KV pages on a GPU.

Programs: ``clean`` has one for each row and each side of a layer, ``convert`` one for each position, and
``flatten_pages`` one for each row.

L layers, N pages of the pool, K kv heads, S page size, E head size, X rows, C positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2

BLOCK = tl.constexpr(1024)


@kernel(do_not_specialize=["part_stride"])
def _clean_kernel(
    pool: tl.tensor, marks: tl.tensor, rows: tl.tensor, page_ids: tl.tensor, part_stride: tl.tensor,
    PAGE_ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    """Clean the pages of one row in the keys or the values of one layer, if the row has failed."""
    row = rows + 3 * tl.program_id(0)
    if tl.load(marks + tl.load(row)) < 0:
        part = pool + tl.program_id(1) * part_stride.to(tl.int64)
        ids = page_ids + tl.load(row + 1)
        for index in range(tl.load(row + 2)):
            page = part + tl.load(ids + index).to(tl.int64) * PAGE_ELEMENTS
            for first in range(0, PAGE_ELEMENTS, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                inside = offsets < PAGE_ELEMENTS
                elements = tl.load(page + offsets, mask=inside, other=0.0)
                is_finite = tl.abs(elements.to(tl.float32)) < float("inf")
                tl.store(page + offsets, tl.where(is_finite, elements, 0.0), mask=inside)


def clean(pool: Tensor, token_ids: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """See ``kernels.clean_pages``: pool [L, 2, N, K, S, E], token_ids [M], rows [X, 3], page_ids [Y]."""
    num_layers, num_sides, _, num_kv_heads, page_size, head_size = pool.shape
    page_elements = num_kv_heads * page_size * head_size
    tensors = pool, token_ids, rows, page_ids
    key = (pool.dtype, page_elements, *alignments(*tensors))
    arguments = (*tensors, pool.stride(1), page_elements)
    _clean_kernel((rows.shape[0], num_layers * num_sides, 1), key, arguments, {"num_warps": 4})


@kernel()
def _convert_kernel(
    keys: tl.tensor, values: tl.tensor, slots: tl.tensor, scales: tl.tensor, out_keys: tl.tensor, out_values: tl.tensor,
    NUM_KV: tl.constexpr, PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the key and the value of one position."""
    position = tl.program_id(0).to(tl.int64)
    head, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (head < NUM_KV) & (columns < SIZE)
    slot = tl.load(slots + position).to(tl.int64)
    source = ((slot // PAGE_SIZE * NUM_KV + head) * PAGE_SIZE + slot % PAGE_SIZE) * SIZE + columns
    key = tl.load(keys + source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(values + source, mask=inside, other=0.0).to(tl.float32)
    if scales is not None:
        key *= tl.load(scales)
        value *= tl.load(scales + 1)
    target = (position * NUM_KV + head) * SIZE + columns
    tl.store(out_keys + target, key.to(out_keys.dtype.element_ty), mask=inside)
    tl.store(out_values + target, value.to(out_values.dtype.element_ty), mask=inside)


def convert(
    pool: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [C, K, E] at slots [C] of keys and values [N, K, S, E]. scales: [2], their factors."""
    _, num_kv, page_size, size = pool[0].shape
    keys, values = torch.empty(2, len(slots), num_kv, size, dtype=dtype, device=slots.device)
    sizes = num_kv, page_size, size, next_power_of_2(num_kv), next_power_of_2(size)
    key = pool[0].dtype, dtype, slots.dtype, sizes, *alignments(*pool, slots, values, scales)
    _convert_kernel((len(slots), 1, 1), key, (*pool, slots, scales, keys, values, *sizes), {"num_warps": 4})
    return keys, values


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["page_table"])
def _pages_kernel(
    page_table: tl.tensor, row_stride: tl.tensor, starts: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Copy the page table of one row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    for first in range(0, count, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < count
        tl.store(out + start + columns, tl.load(page_table + row * row_stride + columns, mask=inside), mask=inside)


def flatten_pages(page_table: Tensor, starts: Tensor, out: Tensor) -> None:
    """Copy row r of the page table [R, P] to ``out[starts[r] : starts[r + 1]]``, for all r, without synchronization."""
    num_rows = page_table.shape[0]
    _pages_kernel[(num_rows,)](page_table, page_table.stride(0), starts, out, BLOCK=128, num_warps=1)
