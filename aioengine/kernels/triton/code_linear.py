"""Matmul with a weight of 4 or 8 bits per number (``Codes``) on a GPU: x [T, I], bias [O] -> [T, O]. G groups.

The time is limited by reading the weight. One row is multiplied in fp32, as in ``vector_linear``. Up to 64 rows use
tensor cores, as in ``skinny_linear``. For more rows, ``dequantize`` the weight first.
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
"""Minimum outputs of a program for several rows."""
MAX_SPLITS = 8
ENOUGH_PROGRAMS = 132
"""The multiprocessors of an H200."""
DEQUANTIZED_COLUMNS = 1024
HALF = tl.constexpr(PACKED_COLUMNS // 2)
CODES_OF_WORD = tl.constexpr(8)
"""4-bit codes in an int32."""
Programs = tuple[int, int, int, int, int]


@triton.jit
def as_scales(values: tl.tensor) -> tl.tensor:
    """Convert loaded scales or offsets to fp32. uint8: exponents, for the numbers of ``numbers_of``."""
    if values.dtype == tl.uint8:
        values = (values.to(tl.int32) + 126 << 23).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _expanded(pointers: tl.tensor, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Load the values of groups [outputs, GROUPS] -> [outputs, GROUPS * WIDTH]; one group is only broadcast."""
    values = as_scales(tl.load(pointers))
    if GROUPS > 1:
        values = tl.broadcast_to(tl.expand_dims(values, 2), (values.shape[0], GROUPS, WIDTH))
        values = tl.reshape(values, (values.shape[0], GROUPS * WIDTH))
    return values


@triton.jit
def numbers_of(codes: tl.tensor, table: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Convert 4-bit codes, or int8 or fp8 numbers, to fp32. Numbers of MXFP4 are multiplied by 2 ** -126."""
    if scales.dtype.element_ty == tl.uint8:  # sign, exponent and mantissa move to their places in fp32
        codes = codes.to(tl.int32)
        return ((codes << 28) & -(1 << 31) | (codes & 7) << 22).to(tl.float32, bitcast=True)
    if table is not None:
        return tl.load(table + codes.to(tl.int32))
    return codes.to(tl.float32)


@triton.jit
def weights_of(
    codes: tl.tensor, table: tl.tensor, scales: tl.tensor, offsets: tl.tensor, GROUPS: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Return the weights in fp32. scales, offsets: pointers [outputs, GROUPS]; offsets may be None."""
    result = numbers_of(codes, table, scales) * _expanded(scales, GROUPS, WIDTH)
    if offsets is not None:
        result += _expanded(offsets, GROUPS, WIDTH)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, table: tl.tensor, bias: tl.tensor,
    partials: tl.tensor, num_done: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * (SIZE // SPLITS)
    outputs, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    known = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    is_row = rows < num_rows
    GROUPS: tl.constexpr = (BLOCK + GROUP - 1) // GROUP
    groups = known * NUM_GROUPS + tl.arange(0, GROUPS)[None, :]
    wait_and_start_next()
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, first + SIZE // SPLITS, BLOCK, num_stages=STAGES):
        own_scales = scales + groups + start // GROUP
        own_offsets = offsets
        if offsets is not None:
            own_offsets = offsets + groups + start // GROUP
        if BITS == 8:
            columns = start + tl.arange(0, BLOCK)
            part = tl.load(weight + known * SIZE + columns[None, :])
            vectors = tl.load(x + rows * SIZE + columns[:, None], mask=is_row, other=0.0)
            if NUM_GROUPS == 1 and offsets is None:
                part = part.to(tl.float32)
            else:
                part = weights_of(part, table, own_scales, own_offsets, GROUPS, GROUP)
            total = tl.dot(part.to(x.dtype.element_ty), vectors, total)
        else:
            places = tl.arange(0, BLOCK // 2)
            packed = tl.load(weight + known * (SIZE // 2) + start // 2 + places[None, :])
            columns = start + places // HALF * (2 * HALF) + places % HALF
            low_vectors = tl.load(x + rows * SIZE + columns[:, None], mask=is_row, other=0.0)
            high_vectors = tl.load(x + rows * SIZE + columns[:, None] + HALF, mask=is_row, other=0.0)
            low = weights_of(packed & 15, table, own_scales, own_offsets, GROUPS, GROUP // 2)
            high = weights_of(packed >> 4, table, own_scales, own_offsets, GROUPS, GROUP // 2)
            total = tl.dot(low.to(x.dtype.element_ty), low_vectors, total)
            total = tl.dot(high.to(x.dtype.element_ty), high_vectors, total)
    if NUM_GROUPS == 1 and BITS == 8 and offsets is None:
        total *= tl.load(scales + known)
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


@triton.jit
def _vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, table: tl.tensor, bias: tl.tensor,
    out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BITS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None]
    wait_and_start_next()
    if BITS == 4:
        # 8 codes per word: byte b has the column b in its low bits, and the column b + HALF in its high bits
        WORDS: tl.constexpr = BLOCK // CODES_OF_WORD
        words = tl.arange(0, WORDS)
        total = tl.zeros((OUTPUTS, WORDS), tl.float32)
        for start in tl.range(0, SIZE // CODES_OF_WORD, WORDS, loop_unroll_factor=4):
            inside = start + words < SIZE // CODES_OF_WORD
            packed = tl.load(
                weight + known * (SIZE // CODES_OF_WORD) + start + words[None, :], mask=inside[None, :], other=0,
                eviction_policy="evict_first",
            )  # fmt: skip
            group = known * NUM_GROUPS + ((start + words) // (GROUP // CODES_OF_WORD))[None, :]
            scale = tl.load(scales + group, mask=inside[None, :], other=0.0)
            columns = (start + words) // 4 * (2 * HALF) + words % 4 * 4
            products = tl.zeros((OUTPUTS, WORDS), tl.float32)
            sums = tl.zeros((WORDS,), tl.float32)
            for index in tl.static_range(CODES_OF_WORD):
                column = columns + (index // 2 + index % 2 * HALF)
                vector = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
                if table is not None:
                    numbers = tl.load(table + (packed >> 4 * index & 15))
                else:  # the bits of 16 + code
                    shift: tl.constexpr = 19 - 4 * index
                    moved = packed << shift if shift > 0 else packed >> -shift
                    numbers = (moved & 0x780000 | 0x41800000).to(tl.float32, bitcast=True)
                products += numbers * vector[None, :]
                sums += vector
            total += products * scale
            offset = tl.zeros((OUTPUTS, WORDS), tl.float32)
            if offsets is not None:
                offset = tl.load(offsets + group, mask=inside[None, :], other=0.0)
            if table is None:
                offset -= scale * 16
            total += offset * sums[None, :]
    else:
        columns = tl.arange(0, BLOCK)
        GROUPS: tl.constexpr = (BLOCK + GROUP - 1) // GROUP
        total = tl.zeros((OUTPUTS, BLOCK if GROUPS == 1 else GROUPS), tl.float32)
        for start in tl.range(0, SIZE, BLOCK, loop_unroll_factor=4):
            inside = start + columns < SIZE
            pointers = weight + known * SIZE + start + columns[None, :]
            part = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
            vector = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            products = part * vector
            vectors = tl.broadcast_to(vector, (OUTPUTS, BLOCK))
            if GROUPS > 1:
                products = tl.sum(tl.reshape(products, (OUTPUTS, GROUPS, GROUP)), 2)
                vectors = tl.sum(tl.reshape(vectors, (OUTPUTS, GROUPS, GROUP)), 2)
            group = known * NUM_GROUPS + start // GROUP + tl.arange(0, GROUPS)[None, :]
            if NUM_GROUPS > 1:
                inner = (start + tl.arange(0, GROUPS) * GROUP < SIZE)[None, :]
                products *= tl.load(scales + group, mask=inner, other=0.0)
                if offsets is not None:
                    products += vectors * tl.load(offsets + group, mask=inner, other=0.0)
            elif offsets is not None:
                products = products * tl.load(scales + group) + vectors * tl.load(offsets + group)
            total += products
    result = tl.sum(total, 1)
    if BITS == 8 and NUM_GROUPS == 1 and offsets is None:
        result *= tl.load(scales + outputs, mask=outputs < num_outputs, other=0.0)
    if bias is not None:
        result += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=outputs < num_outputs)


_vector = KernelLauncher(_vector_kernel)


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, group: int, bits: int) -> Programs | None:
    """Return (outputs per program, inputs per block, splits, stages, warps); None: the kernel lacks these sizes."""
    if size < 128 or size % 128 or not (group % 128 == 0 or (group >= PACKED_COLUMNS // 2 and 128 % group == 0)):
        return None
    block = 256 if size % 256 == 0 and group % 256 in (0, 128, 64, 32, 16) else 128
    splits, tiles = 1, num_tiles(num_outputs)
    while splits < MAX_SPLITS and tiles * splits < ENOUGH_PROGRAMS and size % (2 * splits * block) == 0:
        splits *= 2
    return OUTPUTS, block, splits, 4, 4


def num_tiles(num_outputs: int) -> int:
    """Return the maximum number of output tiles. Each needs a counter."""
    return -(-num_outputs // OUTPUTS)


def matmul(x: Tensor, codes: Codes, bias: Tensor | None, *, programs: Programs, num_done: Tensor) -> Tensor:
    """x [T, I], codes [O, I], bias [O] -> [T, O]. num_done: [num_tiles] int32 zeros, which are zeros again after."""
    (num_outputs, size), num_rows = codes.shape, x.shape[0]
    outputs, block, splits, stages, num_warps = programs
    rows, tiles = max(next_power_of_2(num_rows), LEAST_ROWS), -(-num_outputs // outputs)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_partials = 1 if splits == 1 else tiles * splits * outputs * rows
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    sizes = size, codes.group, codes.scales.shape[1], codes.bits, rows, outputs, block, splits, stages
    arguments = (
        x, codes.packed, codes.scales, codes.offsets, codes.table, bias, partials, num_done, out, num_rows,
        num_outputs, *sizes
    )  # fmt: skip
    key = (x.dtype, *facts(codes), sizes, num_warps, bias is None)
    _matmul((tiles, splits, 1), (*key, *alignments(x, codes.packed)), arguments, options(num_warps))
    return out


def vector_matmul(x: Tensor, codes: Codes, bias: Tensor | None, *, programs: tuple[int, int, int]) -> Tensor:
    """x [1, I], codes [O, I], bias [O] -> [1, O]. programs: outputs per program, inputs per block, warps."""
    num_outputs, size = codes.shape
    outputs, block, num_warps = programs
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    sizes = size, codes.group, codes.scales.shape[1], codes.bits, outputs, block
    weight = codes.packed if codes.bits == 8 else codes.packed.view(torch.int32)
    arguments = (x, weight, codes.scales, codes.offsets, codes.table, bias, out, num_outputs, *sizes)
    key = (x.dtype, *facts(codes), sizes, num_warps, bias is None, *alignments(x, codes.packed))
    _vector((-(-num_outputs // outputs), 1, 1), key, arguments, options(num_warps))
    return out


def facts(codes: Codes) -> tuple[torch.dtype | int | bool, ...]:
    """Return the facts of codes that need other kernels, beside their sizes."""
    return codes.packed.dtype, codes.scales.dtype, codes.shape[0], codes.offsets is None, codes.table is None


@triton.jit
def _dequantize_kernel(
    weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, table: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    start_next_and_wait()
    output = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    group = output * NUM_GROUPS + columns // GROUP
    if BITS == 8:
        codes = tl.load(weight + output * SIZE + columns, mask=inside)
    else:
        place = columns // (2 * HALF) * HALF + columns % HALF
        packed = tl.load(weight + output * (SIZE // 2) + place, mask=inside, other=0).to(tl.int32)
        codes = packed >> (columns // HALF % 2 * 4) & 15
    values = numbers_of(codes, table, scales) * as_scales(tl.load(scales + group, mask=inside, other=0))
    if offsets is not None:
        values += tl.load(offsets + group, mask=inside, other=0.0)
    tl.store(out + output * SIZE + columns, values.to(out.dtype.element_ty), mask=inside)


_dequantize = KernelLauncher(_dequantize_kernel)


def dequantize(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I], with its columns in the order of the codes."""
    num_outputs, size = codes.shape
    out = torch.empty((num_outputs, size), dtype=dtype, device=codes.packed.device)
    sizes = size, codes.group, codes.scales.shape[1], codes.bits, DEQUANTIZED_COLUMNS
    key = (dtype, *facts(codes), sizes, *alignments(codes.packed))
    arguments = (codes.packed, codes.scales, codes.offsets, codes.table, out, *sizes)
    _dequantize((num_outputs, -(-size // DEQUANTIZED_COLUMNS), 1), key, arguments, options(4))
    return out
