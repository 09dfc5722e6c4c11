"""Matmul with a weight of 4 or 8 bits per number (``Codes``) on a GPU: x [T, I], bias [O] -> [T, O]. G groups.

Up to 64 rows, the time is limited by reading the weight, as in ``skinny_linear``. For more rows, ``dequantize`` the
weight first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.codes import PACKED_COLUMNS
from aioengine.kernels.triton.dependent import start_next_and_wait, wait_and_start_next
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.codes import Codes

MAX_ROWS = 64
LEAST_ROWS = 16
OUTPUTS = 64
"""Outputs of a program."""
MAX_SPLITS = 8
ENOUGH_PROGRAMS = 132
"""The multiprocessors of an H200."""
DEQUANTIZED_COLUMNS = 1024
HALF = tl.constexpr(PACKED_COLUMNS // 2)


@triton.jit
def _shifted(codes: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Convert 4-bit codes to the type of x, plus ``_shift``: in 16 bits they become the last bits of this number."""
    if x.dtype.element_ty == tl.bfloat16:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif x.dtype.element_ty == tl.float16:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def _shift(x: tl.tensor) -> tl.constexpr:
    """Return the number that ``_shifted`` adds."""
    return 128.0 if x.dtype.element_ty == tl.bfloat16 else 1024.0 if x.dtype.element_ty == tl.float16 else 0.0


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, bias: tl.tensor, partials: tl.tensor,
    num_done: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * (SIZE // SPLITS)
    outputs, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    known = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    bytes_per_row: tl.constexpr = SIZE * BITS // 8
    is_row = rows < num_rows
    wait_and_start_next()
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, first + SIZE // SPLITS, BLOCK, num_stages=STAGES):
        group = known * NUM_GROUPS + start // GROUP
        scale = tl.load(scales + group)
        if BITS == 8:
            columns = start + tl.arange(0, BLOCK)
            part = tl.load(weight + known * bytes_per_row + columns[None, :])
            vectors = tl.load(x + rows * SIZE + columns[:, None], mask=is_row, other=0.0)
            products = tl.dot(part.to(tl.float32).to(x.dtype.element_ty), vectors)  # faster than one conversion
            if zeros is not None:
                sums = tl.sum(vectors.to(tl.float32), 0)[None, :]
                products -= tl.load(zeros + group).to(tl.float32) * sums
        else:
            places = tl.arange(0, BLOCK // 2)
            packed = tl.load(weight + known * bytes_per_row + start // 2 + places[None, :])
            columns = start + places // HALF * (2 * HALF) + places % HALF
            vectors = tl.load(x + rows * SIZE + columns[:, None], mask=is_row, other=0.0)
            high_vectors = tl.load(x + rows * SIZE + columns[:, None] + HALF, mask=is_row, other=0.0)
            products = tl.dot(_shifted(packed & 15, x), vectors)
            products = tl.dot(_shifted(packed >> 4, x), high_vectors, products)
            sums = tl.sum(vectors.to(tl.float32) + high_vectors.to(tl.float32), 0)[None, :]
            products -= (tl.load(zeros + group).to(tl.float32) + _shift(x)) * sums
        total += products * scale
    is_last = True
    if SPLITS > 1:
        own = partials + tile.to(tl.int64) * (SPLITS * OUTPUTS * ROWS) + tl.arange(0, OUTPUTS)[:, None] * ROWS + rows
        tl.store(own + split * (OUTPUTS * ROWS), total)
        tl.debug_barrier()  # all threads must have stored before one increments the counter
        is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            total = tl.load(own, cache_modifier=".cg")  # bypass L1: other multiprocessors wrote it
            for other in tl.static_range(1, SPLITS):
                total += tl.load(own + other * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(num_done + tile, 0)
    if is_last:
        if bias is not None:
            total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        inside = is_row & (outputs < num_outputs)
        tl.store(out + rows * num_outputs + outputs, total.to(out.dtype.element_ty), mask=inside)


_matmul = KernelLauncher(_matmul_kernel)


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, group: int) -> tuple[int, int, int, int] | None:
    """Return (inputs per block, splits, stages, warps); None: the kernel does not support the sizes."""
    block = min(group, 128)
    if size % block or block < PACKED_COLUMNS:
        return None
    splits, tiles = 1, num_tiles(num_outputs)
    while splits < MAX_SPLITS and tiles * splits < ENOUGH_PROGRAMS and size % (2 * splits * block) == 0:
        splits *= 2
    return block, splits, 4, 4


def num_tiles(num_outputs: int) -> int:
    """Return the number of output tiles. Each needs a counter."""
    return -(-num_outputs // OUTPUTS)


def matmul(
    x: Tensor, codes: Codes, bias: Tensor | None, *, programs: tuple[int, int, int, int], num_done: Tensor
) -> Tensor:
    """x [T, I], codes [O, I], bias [O] -> [T, O]. num_done: [num_tiles] int32 zeros, which are zeros again after."""
    (num_outputs, size), num_rows = codes.shape, x.shape[0]
    block, splits, stages, num_warps = programs
    rows, tiles = max(next_power_of_2(num_rows), LEAST_ROWS), num_tiles(num_outputs)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_partials = 1 if splits == 1 else tiles * splits * OUTPUTS * rows
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    sizes = size, codes.group, codes.scales.shape[1], codes.bits, rows, OUTPUTS, block, splits, stages
    arguments = (
        x, codes.packed, codes.scales, codes.zeros, bias, partials, num_done, out, num_rows, num_outputs, *sizes
    )  # fmt: skip
    key = (x.dtype, codes.packed.dtype, num_outputs, sizes, codes.zeros is None, bias is None)
    _matmul((tiles, splits, 1), (*key, *alignments(x, codes.packed)), arguments, options(num_warps))
    return out


@triton.jit
def _dequantize_kernel(
    weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    start_next_and_wait()
    output = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    group = output * NUM_GROUPS + columns // GROUP
    scale = tl.load(scales + group, mask=inside, other=0.0)
    if BITS == 8:
        codes = tl.load(weight + output * SIZE + columns, mask=inside)
    else:
        place = columns // (2 * HALF) * HALF + columns % HALF
        packed = tl.load(weight + output * (SIZE // 2) + place, mask=inside).to(tl.int32)
        codes = packed >> (columns // HALF % 2 * 4) & 15
    if zeros is not None:
        codes = codes.to(tl.int32) - tl.load(zeros + group, mask=inside, other=0).to(tl.int32)
    values = codes.to(tl.float32) * scale
    tl.store(out + output * SIZE + columns, values.to(out.dtype.element_ty), mask=inside)


_dequantize = KernelLauncher(_dequantize_kernel)


def dequantize(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I], with its columns in the order of the codes."""
    num_outputs, size = codes.shape
    out = torch.empty((num_outputs, size), dtype=dtype, device=codes.packed.device)
    sizes = size, codes.group, codes.scales.shape[1], codes.bits, DEQUANTIZED_COLUMNS
    key = (dtype, codes.packed.dtype, sizes, codes.zeros is None, *alignments(codes.packed))
    arguments = (codes.packed, codes.scales, codes.zeros, out, *sizes)
    _dequantize((num_outputs, -(-size // DEQUANTIZED_COLUMNS), 1), key, arguments, options(4))
    return out
