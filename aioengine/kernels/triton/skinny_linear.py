"""Matmul of few rows with a large weight on a GPU: x [T, I], weight [O, I], bias [O] -> [T, O].

The time is limited by reading the weight.

One row (``vector_matmul``): a program computes some outputs over all inputs. It loads the first block of its weights
while the previous kernel still runs, and then waits for x. Products are added in fp32 without tensor cores.

2 to ``SKINNY_ROWS`` rows (``matmul``): a program computes some outputs of all rows, over one split of the inputs. The
weight is the left operand, so that its outputs are the rows of the tensor core instruction. Sums are in fp32, from the
first to the last input of a split. The program of a tile that finishes last adds the splits in order. The number of
splits depends only on O and I.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.activation import activated
from aioengine.kernels.triton.dependent import DEPENDENT, is_last, wait_and_start_next
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, kernel, next_power_of_2, options

FEW_OUTPUTS = 4096
"""The hidden size of an 8B model: the tiles of few rows do not keep all processors busy."""
MANY_OUTPUTS = 16_384
"""The tiles of few rows keep all processors busy."""
SKINNY_ROWS = 64
"""Maximum rows of the skinny kernel. With more rows, other kernels are faster."""
MIN_ROWS = 8
"""Minimum rows of a tile: rows are the columns of the tensor core instruction."""
HEAD_OUTPUTS = 65_536
"""Fewer than the tokens of most vocabularies."""


@triton.jit
def products(
    line_pointers: tl.tensor, is_line: tl.tensor, x: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the products [lines] of lines of a matrix with one row x. line_pointers: [lines, 1].

    The products of columns that are ``BLOCK`` apart are added first, then these ``BLOCK`` sums.

    The next kernel can start as soon as x is complete, so it may read x without waiting (``adapter_linear``).
    """
    IS_WIDE: tl.constexpr = line_pointers.dtype.element_ty.primitive_bitwidth > 8
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 8)  # each thread loads these weights and these inputs
    pointers = line_pointers + columns[None, :]
    part = tl.load(pointers, mask=is_line & (columns[None, :] < SIZE), other=0.0, eviction_policy="evict_first")
    wait_and_start_next()
    vector = tl.load(x + columns, mask=columns < SIZE, other=0.0)
    total = part.to(tl.float32) * vector.to(tl.float32)[None, :]
    for start in tl.range(BLOCK, SIZE, BLOCK, loop_unroll_factor=4 if IS_WIDE else 1):
        inside = start + columns < SIZE
        part = tl.load(pointers + start, mask=is_line & inside[None, :], other=0.0, eviction_policy="evict_first")
        vector = tl.load(x + start + columns, mask=inside, other=0.0)
        total += part.to(tl.float32) * vector.to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``LINES`` outputs, and multiply them by ``scales`` if there are any. A kernel of ``adapter_linear`` calls
    it too.
    """
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    line_pointers = weight + lines[:, None].to(tl.int64) * SIZE
    result = products(line_pointers, lines[:, None] < num_outputs, x, SIZE, BLOCK)
    if scales is not None:
        result *= tl.load(scales + lines, mask=lines < num_outputs, other=0.0)
    if bias is not None:
        result += tl.load(bias + lines, mask=lines < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + lines, result.to(out.dtype.element_ty), mask=lines < num_outputs)


@kernel()
def _gated_vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``OUTPUTS`` results, each from two lines: its gate and its up."""
    lines = tl.arange(0, 2 * OUTPUTS)
    outputs = tl.program_id(0) * OUTPUTS + lines // 2
    lines = lines % 2 * num_outputs + outputs
    line_pointers = weight + lines[:, None].to(tl.int64) * SIZE
    result = products(line_pointers, outputs[:, None] < num_outputs, x, SIZE, BLOCK)
    if scales is not None:
        result *= tl.load(scales + lines, mask=outputs < num_outputs, other=0.0)
    gate, up = tl.split(tl.reshape(result, (OUTPUTS, 2)))
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(out + outputs, activated(gate, up, out.dtype.element_ty), mask=outputs < num_outputs)


_vector = KernelLauncher(vector_kernel)


@lru_cache(maxsize=256)
def shape_of_vector_programs(num_outputs: int, size: int, bits: int = 16) -> tuple[int, int, int]:
    """Return (lines per program, columns per block, warps), as measured on an H200 for layers of 0.6B and 8B models."""
    if bits == 8 and size <= 4096:  # one block, which is loaded while the previous kernel still runs
        return 2 if num_outputs <= size else 4, next_power_of_2(size), 4
    if size <= 1024:
        return 4, 512, 4
    if num_outputs <= 1024:
        return (4, 2048, 4) if size <= 2048 else (2, 1024, 8)
    return 4, 1024, 4


def vector_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """x [1, I], weight [O, I], bias [O] -> [1, O]. scales: [1, O] fp32, of a weight in fp8."""
    num_outputs, size = weight.shape
    lines, block, num_warps = shape_of_vector_programs(num_outputs, size, 8 * weight.itemsize)
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    arguments = (x, weight, scales, bias, out, num_outputs, size, lines, block)
    key = (x.dtype, weight.dtype, weight.shape, lines, block, num_warps, bias is None, *alignments(x, weight))
    _vector((-(-num_outputs // lines), 1, 1), key, arguments, options(num_warps))
    return out


def gated_vector_matmul(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """x [1, I], weight [O, I] -> silu(first half of the outputs) * (second half) [1, O / 2].

    scales: [1, O] fp32, of a weight in fp8.
    """
    num_lines, size = weight.shape
    lines, block, num_warps = shape_of_vector_programs(num_lines, size, 8 * weight.itemsize)
    num_outputs, outputs = num_lines // 2, lines // 2
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    key = (x.dtype, weight.dtype, weight.shape, *alignments(x, weight))
    arguments = (x, weight, scales, out, num_outputs, size, outputs, block)
    _gated_vector_kernel((-(-num_outputs // outputs), 1, 1), key, arguments, options(num_warps))
    return out


SkinnyPrograms = tuple[int, int, int, int, int, int]
"""(outputs per program, inputs per block, splits, stages, warps, cache lines to prefetch)."""


@triton.jit
def with_other_splits(
    total: tl.tensor, partials: tl.tensor, num_done: tl.tensor, tile: tl.tensor, split: tl.tensor, SPLITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Store the sum of one split of a tile [A, B]. The program that finishes last returns the sum of all splits, added
    in order, and True; the others return their own sum and False. With one split, nothing is stored.

    partials: [tiles, SPLITS, A, B]. num_done: [tiles] zeros, which are zeros again after the last program.
    """
    all_done = True
    if SPLITS > 1:
        HEIGHT: tl.constexpr = total.shape[0]
        WIDTH: tl.constexpr = total.shape[1]
        own = partials + tile.to(tl.int64) * (SPLITS * HEIGHT * WIDTH) + tl.arange(0, HEIGHT)[:, None] * WIDTH
        own += tl.arange(0, WIDTH)[None, :]
        tl.store(own + split * (HEIGHT * WIDTH), total)
        all_done = is_last(num_done + tile, SPLITS)
        if all_done:
            total = tl.load(own, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(own + other * (HEIGHT * WIDTH), cache_modifier=".cg")
            tl.store(num_done + tile, 0)
    return total, all_done


@triton.jit
def prefetch(addresses: tl.tensor) -> None:
    """Prefetch weights at ``addresses`` [...], which do not depend on the previous kernel."""
    if DEPENDENT:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@kernel(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, partials: tl.tensor, num_done: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``OUTPUTS`` outputs of all rows, over a split of the inputs. AHEAD: cache lines of a line to prefetch."""
    tile, split = tl.program_id(0), tl.program_id(1)
    first = split * (SIZE // SPLITS)
    outputs, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS)[:, None], tl.arange(0, ROWS)[None, :]
    columns = tl.arange(0, BLOCK)
    line_pointers = weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64) * SIZE + first
    if AHEAD > 0:  # 64 elements per cache line
        prefetch(line_pointers + tl.arange(0, AHEAD)[None, :] * 64)
    wait_and_start_next()  # not earlier: the next kernel may read x without waiting (adapter_linear)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, SIZE // SPLITS, BLOCK, num_stages=STAGES):
        part = tl.load(line_pointers + start + columns[None, :])
        vectors = tl.load(x + rows * SIZE + first + start + columns[:, None], mask=rows < num_rows, other=0.0)
        total = tl.dot(part, vectors, total)
    total, all_done = with_other_splits(total, partials, num_done, tile, split, SPLITS)
    if all_done:
        inside = (rows < num_rows) & (outputs < num_outputs)
        if bias is not None:
            total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        tl.store(out + rows * num_outputs + outputs, total.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, num_rows: int) -> SkinnyPrograms | None:
    """Return the programs, as measured on an H200 for the layers of 0.6B and 8B models; None: torch is faster."""
    if size % 512 or num_rows > SKINNY_ROWS:
        return None
    is_few = num_rows <= SKINNY_ROWS // 2
    if size <= 1024:
        if num_outputs >= HEAD_OUTPUTS:
            return (64, 128, 1, 4, 4, 0) if is_few else None
        return (64, 256, 1, 3, 4, 8) if is_few else (64, 128, 1, 4, 4, 8)
    if num_outputs <= 1024:
        return 64, 128, 4, 4, 4, 8 if size >= 2048 else 4  # no cache lines beyond the end of a split
    if num_outputs <= FEW_OUTPUTS:
        is_wide = is_few and num_outputs > 3072
        return (64, 256, 2, 3, 4, 0) if is_wide else (64, 128, 2, 4, 4, 0)
    if num_outputs <= MANY_OUTPUTS:
        return (64, 256, 1, 3, 4, 0) if is_few else None
    return 128, 128, 1, 3, 8, 0


def num_tiles(num_outputs: int) -> int:
    """Return the maximum number of output tiles. Each needs a counter."""
    return -(-num_outputs // 64)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, *, programs: SkinnyPrograms, num_done: Tensor) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]. num_done: [num_tiles] int32 zeros, which are zeros again after."""
    outputs, block, splits, stages, num_warps, ahead = programs
    num_rows, num_outputs, size = x.shape[0], *weight.shape
    rows = max(next_power_of_2(num_rows), MIN_ROWS)
    tiles = -(-num_outputs // outputs)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    partials = (
        out if splits == 1 else torch.empty(tiles * splits * outputs * rows, dtype=torch.float32, device=x.device)
    )
    sizes = size, rows, outputs, block, splits, stages, ahead
    arguments = (x, weight, bias, partials, num_done, out, num_rows, num_outputs, *sizes)
    key = (x.dtype, weight.shape, programs, rows, bias is None, *alignments(x, weight))
    _skinny_kernel((tiles, splits, 1), key, arguments, options(num_warps))
    return out
