"""Batch-invariant matmuls on a GPU: x [T, I], weight [O, I], bias [O] -> [T, O], or with a weight for each head.

Sums: each element is summed over the inputs from first to last, by tensor core instructions of the same depth. So every
tile size gives the same bits, and the fastest one can be chosen. A weight with few outputs and many inputs
(``num_splits``) has two sums per element, of the first and the second half of the inputs, so that few rows keep the GPU
busy. The second sum is added to the first. In fp32, there are no tensor cores.

Kernels, on Hopper and in 16 bits:

- One row, if an element has two sums, or if it has a gate and an up (``_row_kernel``): a program computes both.
- Up to ``skinny_linear.SKINNY_ROWS`` rows: ``skinny_linear``.
- More rows (``_tiled_kernel``): a program computes some tiles of rows and outputs, which it loads by TMA.

On other GPUs, in fp32 and with other sizes, a program computes one tile (``_matmul_kernel``). H heads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aioengine.kernels.triton import skinny_linear
from aioengine.kernels.triton.activation import activate_and_mul, activated
from aioengine.kernels.triton.dependent import wait_and_start_next
from aioengine.kernels.triton.launcher import PROCESSORS, alignments, has_dependent_launch, kernel, options
from aioengine.kernels.triton.skinny_linear import FEW_OUTPUTS, MANY_OUTPUTS, SKINNY_ROWS, SkinnyPrograms, prefetch


class Tile(NamedTuple):
    """Rows and outputs of a program, the inputs of a block, the stages of its loop, and its warps."""

    rows: int
    outputs: int
    block: int
    stages: int
    warps: int


TINY = Tile(64, 64, 64, 6, 4)
SMALL = Tile(64, 128, 64, 4, 4)
MEDIUM = Tile(128, 128, 64, 3, 4)
LARGE = Tile(128, 256, 64, 4, 8)
SPLIT_TINY = Tile(64, 64, 64, 3, 4)
"""A tile for two sums of each element, which are both in registers. Each stage loads the inputs of both."""
SPLIT_SMALL = Tile(64, 128, 64, 4, 4)
SPLIT_MEDIUM = Tile(128, 128, 64, 3, 8)
GATED = Tile(128, 128, 64, 4, 8)
GATED_SIZE = 2048
"""With more inputs and many rows, a separate activation is faster."""
FEW_INPUTS = 1024
"""With more inputs and one sum of each element, ``skinny_linear`` multiplies one row faster."""
ROW_OUTPUTS = 8
"""Outputs of a program that multiplies one row: the minimum for tensor cores."""
COPIES = tl.constexpr(16)
"""Copies of one row, which tensor cores multiply: the minimum."""
ANY = Tile(64, 64, 128, 4, 4)
"""The tile of the kernel that supports all sizes, in 16 bits."""
FP32 = Tile(32, 32, 32, 2, 4)
"""The tile of fp32 matmuls, which run without tensor cores."""
SMALL_TILE_ROWS = 256
"""With up to this number of rows, small tiles are faster, unless there are ``MANY_OUTPUTS``."""
BAND = tl.constexpr(8)
"""Row tiles that are computed together for the same outputs, so that they read the weights from the cache."""


@triton.jit
def loaded(pointers: tl.tensor, inside: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """Load from pointers [...]; 0 outside of the mask. IS_WHOLE: the mask is true everywhere."""
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _tile_of(
    index: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the first row and the first output of a tile."""
    band_size = BAND * tl.cdiv(num_outputs, OUTPUTS)
    first_tile = index // band_size * BAND
    tiles_of_band = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, BAND)
    index = index % band_size
    return (first_tile + index % tiles_of_band) * ROWS, index // tiles_of_band * OUTPUTS


@triton.jit
def _store(
    total: tl.tensor, bias: tl.tensor, out: tl.tensor, first_row: tl.tensor, first_output: tl.tensor,
    num_rows: tl.tensor, num_outputs: tl.tensor,
) -> None:  # fmt: skip
    """Store the sums of a tile, plus the bias if there is one."""
    rows, outputs = first_row + tl.arange(0, total.shape[0]), first_output + tl.arange(0, total.shape[1])
    is_output = (outputs < num_outputs)[None, :]
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & is_output)


@kernel(do_not_specialize=["num_rows"])  # one specialization serves all counts
def _matmul_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile."""
    first_row, first_output = _tile_of(tl.program_id(0), num_rows, num_outputs, ROWS, OUTPUTS)
    rows, outputs = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, BLOCK)
    # rows and outputs beyond the end repeat the first one, which avoids a mask in the loop
    x_pointers = x + (tl.where(rows < num_rows, rows, 0).to(tl.int64) * SIZE)[:, None] + columns[None, :]
    lines = tl.where(outputs < num_outputs, outputs, 0).to(tl.int64)
    line_pointers = weight + (lines * SIZE)[:, None] + columns[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, BLOCK):
        inside = (start + columns < SIZE)[None, :]
        vectors = loaded(x_pointers + start, inside, SIZE % BLOCK == 0)
        part = loaded(line_pointers + start, inside, SIZE % BLOCK == 0)
        total = tl.dot(vectors, tl.trans(part), total, input_precision="ieee")
    _store(total, bias, out, first_row, first_output, num_rows, num_outputs)


@kernel(do_not_specialize=["num_rows"])
def _tiled_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, IS_GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute every n-th tile, where n is the number of programs. The two loops are compiled as one, so that the inputs
    of the next tile are loaded while a tile is stored; tiles with two sums or gates are slower in this way.

    SPLITS: sums of each element, 1 or 2. IS_GATED: compute silu(gate) * up.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    IS_FLAT: tl.constexpr = SPLITS == 1 and not IS_GATED
    PART: tl.constexpr = SIZE // SPLITS
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_outputs, OUTPUTS)
    for tile in tl.range(program, num_tiles, num_programs, flatten=IS_FLAT):
        first_row, first_output = _tile_of(tile, num_rows, num_outputs, ROWS, OUTPUTS)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        second = total
        for start in tl.range(0, PART, BLOCK, num_stages=STAGES):
            vectors = x.load([first_row, start])
            total = tl.dot(vectors, weight.load([first_output, start]).T, total)
            if IS_GATED:
                second = tl.dot(vectors, weight.load([num_outputs + first_output, start]).T, second)
            elif SPLITS == 2:
                vectors = x.load([first_row, PART + start])
                second = tl.dot(vectors, weight.load([first_output, PART + start]).T, second)
        if IS_GATED:
            total = activated(total, second, out.dtype.element_ty)
        elif SPLITS == 2:
            total += second
        _store(total, bias, out, first_row, first_output, num_rows, num_outputs)


@kernel()
def _row_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, SUMS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, IS_GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row. An output has one sum, or two, of the halves of the inputs or of gate and up; each is computed
    by one warp. EARLY: blocks of weights to load before waiting for x. AHEAD: cache lines of each sum to prefetch
    after them, of 64 weights.
    """
    PART: tl.constexpr = SIZE if IS_GATED else SIZE // SUMS
    which = tl.arange(0, SUMS)[:, None, None]
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    lines = tl.minimum(outputs, num_outputs - 1).to(tl.int64)[None, :, None]
    if IS_GATED:
        line_pointers, x_pointers = weight + (lines + which * num_outputs) * SIZE, x + which * 0
    else:
        line_pointers, x_pointers = weight + lines * SIZE + which * PART, x + which * PART
    columns = tl.arange(0, BLOCK)[None, None, :]
    parts = (tl.load(line_pointers + columns),)
    for index in tl.static_range(1, EARLY):
        parts += (tl.load(line_pointers + (index * BLOCK + columns)),)
    if AHEAD > 0:
        prefetch(line_pointers + EARLY * BLOCK + tl.arange(0, AHEAD)[None, None, :] * 64)
    wait_and_start_next()
    total = tl.zeros((SUMS, COPIES, OUTPUTS), tl.float32)
    for index in tl.static_range(EARLY):
        vector = tl.broadcast_to(tl.load(x_pointers + (index * BLOCK + columns)), (SUMS, COPIES, BLOCK))
        total = tl.dot(vector, tl.permute(parts[index], (0, 2, 1)), total)
    for start in tl.range(EARLY * BLOCK, PART, BLOCK, num_stages=STAGES):
        part = tl.load(line_pointers + (start + columns))
        vector = tl.broadcast_to(tl.load(x_pointers + (start + columns)), (SUMS, COPIES, BLOCK))
        total = tl.dot(vector, tl.permute(part, (0, 2, 1)), total)
    sums = tl.max(total, 1)
    if SUMS == 1:
        result = tl.reshape(sums, outputs.shape)
    else:
        one, other = tl.split(tl.permute(sums, (1, 0)))
        result = activated(one, other, out.dtype.element_ty) if IS_GATED else one + other
    if bias is not None:
        result += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=outputs < num_outputs)


def _num_tiles(num_rows: int, num_outputs: int, tile: Tile) -> int:
    return -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)


def num_splits(num_outputs: int, size: int) -> int:
    """Return the number of sums of each element. It must not depend on the number of rows."""
    return 2 if num_outputs <= FEW_OUTPUTS and size >= 2048 else 1


def programs_of(num_rows: int, num_outputs: int, size: int) -> SkinnyPrograms | None:
    """Return the programs of ``skinny_linear`` for few rows; None: use tiles. Measured as in ``tile_for``."""
    if num_rows > SKINNY_ROWS:
        return None
    if num_rows == 1 and num_splits(num_outputs, size) == 1:
        return (16, 256, 1, 3, 1, 0) if num_outputs > MANY_OUTPUTS else (16, 256, 1, 4, 2, 8)
    if num_outputs > MANY_OUTPUTS:
        return 128, 128, 1, 3, 8, 0
    return 64, 128, num_splits(num_outputs, size), 4, 4, 0


def row_programs(size: int, sums: int, *, is_gated: bool) -> tuple[int, int, int, int]:
    """Return (inputs per block, blocks to load early, stages, cache lines to prefetch) for sums of ``size`` inputs.
    Measured as in ``tile_for``.
    """
    if size > 1536 and size % 512 == 0:
        return 512, 2, 3, 16
    if size == 1024 and sums == 2 and not is_gated:
        return 1024, 1, 1, 0
    early = min(size // 256, 2 if sums == 1 else 3)
    return 256, early, 3, min((size - 256 * early) // 64, 8)


@lru_cache(maxsize=1024)
def tile_for(num_rows: int, num_outputs: int, splits: int) -> Tile:
    """Return the fastest tile. Measured on an H200 for the layers of 0.6B and 8B models."""
    tiny, small, medium = (TINY, SMALL, MEDIUM) if splits == 1 else (SPLIT_TINY, SPLIT_SMALL, SPLIT_MEDIUM)
    num_small, num_medium, num_large = (_num_tiles(num_rows, num_outputs, tile) for tile in (small, medium, LARGE))
    if num_medium < PROCESSORS or (num_rows <= SMALL_TILE_ROWS and num_outputs <= MANY_OUTPUTS):
        return tiny if splits * num_small < PROCESSORS else small
    is_large = splits == 1 and 2 * -(-num_large // PROCESSORS) <= 1.1 * -(-num_medium // PROCESSORS)
    return LARGE if is_large else medium


class InvariantMatmul:
    """The matmul with weight [O, I] and bias [O]."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, num_done: Tensor | None = None, *, is_constant: bool = True
    ) -> None:
        """weight: contiguous [O, I]. bias: [O]. num_done: see ``skinny_linear.matmul``; None: allocate it.

        is_constant: otherwise the previous kernel may still write the weight, so it must not be loaded early.
        """
        self._weight, self._bias, self._is_constant = weight, bias, is_constant
        num_outputs, size = weight.shape
        self._splits = num_splits(num_outputs, size)
        if num_done is None:  # a counter for each tile that several programs compute: at most as many as processors
            num_done = torch.zeros(PROCESSORS, dtype=torch.int32, device=weight.device)
        self._num_done = num_done
        is_aligned = size % 512 == 0 and weight.data_ptr() % 16 == 0
        self._is_fast = is_aligned and weight.dtype != torch.float32 and has_dependent_launch()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        x, weight, bias = x.contiguous(), self._weight, self._bias
        if not self._is_fast or x.data_ptr() % 16:
            return matmul(x, weight, bias)
        is_fast_row = self._splits == 2 or (x.shape[1] <= FEW_INPUTS and len(weight) <= MANY_OUTPUTS)
        if len(x) == 1 and self._is_constant and is_fast_row:
            return self._row(x, is_gated=False)
        programs = programs_of(len(x), *weight.shape)
        if programs is not None:
            return skinny_linear.matmul(x, weight, bias, programs=programs, num_done=self._num_done)
        return self._tiled(x, tile_for(len(x), len(weight), self._splits), is_gated=False)

    def gated(self, x: Tensor) -> Tensor:
        """[T, I] -> silu(first half of the outputs) * (second half), [T, O / 2]."""
        if self._is_fast and self._splits == 1 and self._bias is None and x.is_contiguous() and x.data_ptr() % 16 == 0:
            if len(x) == 1 and self._is_constant:
                return self._row(x, is_gated=True)
            is_fused = len(x) <= SMALL_TILE_ROWS or x.shape[1] <= GATED_SIZE
            if is_fused and _num_tiles(len(x), len(self._weight) // 2, GATED) >= PROCESSORS:
                return self._tiled(x, GATED, is_gated=True)
        return activate_and_mul(self(x), "silu")

    def _row(self, x: Tensor, *, is_gated: bool) -> Tensor:
        """[1, I] -> [1, O], or [1, O / 2] if gated."""
        weight, bias = self._weight, self._bias
        num_outputs = len(weight) // 2 if is_gated else len(weight)
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
        sums = 2 if is_gated else self._splits
        part = x.shape[1] if is_gated else x.shape[1] // sums
        sizes = x.shape[1], sums, ROW_OUTPUTS, *row_programs(part, sums, is_gated=is_gated), is_gated
        key = x.dtype, weight.shape, is_gated, *alignments(bias)
        arguments = (x, weight, bias, out, num_outputs, *sizes)
        _row_kernel((-(-num_outputs // ROW_OUTPUTS), 1, 1), key, arguments, options(num_warps=sums))
        return out

    def _tiled(self, x: Tensor, tile: Tile, *, is_gated: bool) -> Tensor:
        """[T, I] -> [T, O], or [T, O / 2] if gated."""
        weight, bias, num_rows = self._weight, self._bias, len(x)
        num_outputs = len(weight) // 2 if is_gated else len(weight)
        rows, outputs, block, stages, num_warps = tile
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
        sizes = x.shape[1], rows, outputs, block, stages, self._splits, is_gated
        tensors = TensorDescriptor.from_tensor(x, [rows, block]), TensorDescriptor.from_tensor(weight, [outputs, block])
        key = x.dtype, weight.shape, sizes, *alignments(bias)
        num_programs = _num_tiles(num_rows, num_outputs, tile)
        if not is_gated:
            num_programs = min(num_programs, PROCESSORS * (2 if num_warps == 4 and self._splits == 1 else 1))
        arguments = (*tensors, bias, out, num_rows, num_outputs, *sizes)
        _tiled_kernel((num_programs, 1, 1), key, arguments, {"num_warps": num_warps})
        return out


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]; x and weight are contiguous."""
    (num_outputs, size), num_rows = weight.shape, len(x)
    rows, outputs, block, num_stages, num_warps = tile = FP32 if x.dtype == torch.float32 else ANY
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    arguments = (x, weight, bias, out, num_rows, num_outputs, size, rows, outputs, block)
    key = x.dtype, weight.shape, tile, *alignments(x, weight, bias)
    grid = _num_tiles(num_rows, num_outputs, tile), 1, 1
    _matmul_kernel(grid, key, arguments, {"num_warps": num_warps, "num_stages": num_stages})
    return out


HEADS, FP32_HEADS = Tile(64, 64, 64, 3, 4), Tile(32, 32, 32, 3, 4)
"""The tiles of ``head_matmul``, in 16 bits and in fp32."""


@kernel(do_not_specialize=["num_rows"])
def _heads_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
    NUM_OUTPUTS: tl.constexpr, SIZE: tl.constexpr, X_ROW: tl.constexpr, X_HEAD: tl.constexpr, WEIGHT_HEAD: tl.constexpr,
    WEIGHT_INPUT: tl.constexpr, WEIGHT_OUTPUT: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of one head. X_ROW ... OUT_HEAD: strides."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    head = tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    x_pointers = x + head * X_HEAD + (rows.to(tl.int64) * X_ROW)[:, None] + columns[None, :]
    weight += head * WEIGHT_HEAD
    weight_pointers = weight + (columns * WEIGHT_INPUT)[:, None] + (outputs * WEIGHT_OUTPUT)[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, BLOCK):
        inside = start + columns < SIZE
        vectors = tl.load(x_pointers + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & is_output[None, :]
        part = tl.load(weight_pointers + start * WEIGHT_INPUT, mask=mask, other=0.0)
        total = tl.dot(vectors, part, total, input_precision="ieee")
    targets = out + head * OUT_HEAD + (rows.to(tl.int64) * OUT_ROW)[:, None] + outputs[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def head_matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, I] by weight [H, I, O] into out [T, H, O]. The last dimension of x and out is contiguous."""
    num_rows = x.shape[0]
    num_heads, size, num_outputs = weight.shape
    rows, outputs, block, num_stages, num_warps = FP32_HEADS if x.dtype == torch.float32 else HEADS
    sizes = num_outputs, size, *x.stride()[:2], *weight.stride(), *out.stride()[:2], rows, outputs, block
    tensors = x, weight, out
    key = x.dtype, sizes, *alignments(*tensors)
    grid = -(-num_rows // rows), -(-num_outputs // outputs), num_heads
    _heads_kernel(grid, key, (*tensors, num_rows, *sizes), {"num_warps": num_warps, "num_stages": num_stages})
