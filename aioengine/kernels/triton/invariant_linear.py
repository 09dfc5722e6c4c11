"""Batch-invariant matmuls on a GPU: x [T, I], weight [O, I], bias [O] -> [T, O], or with a weight for each head.

Each element is summed over the inputs from first to last, by tensor core instructions of the same depth. So every tile
size gives the same bits, and the fastest one can be chosen. H heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import KernelLauncher, alignments

Tile = tuple[int, int, int, int, int]
"""(rows, outputs, inputs per block, stages, warps)."""

SMALL: Tile = 64, 64, 128, 4, 4
MEDIUM: Tile = 64, 128, 64, 4, 4
LARGE: Tile = 128, 256, 64, 3, 8
FP32: Tile = 32, 32, 32, 2, 4
"""The tile of fp32 matmuls, which run without tensor cores."""
ENOUGH_TILES = 128
"""Number of tiles that fills a GPU."""
BAND = tl.constexpr(8)
"""Row tiles that are computed together for the same outputs, so that they read the weights from the cache."""


@triton.jit
def loaded(pointers: tl.tensor, inside: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """Load from pointers [...]; 0 outside of the mask. IS_WHOLE: the mask is true everywhere."""
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])  # one specialization serves all counts
def _matmul_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row_tiles = tl.cdiv(num_rows, ROWS)
    band_size = BAND * tl.cdiv(num_outputs, OUTPUTS)
    first_tile = tl.program_id(0) // band_size * BAND
    tiles_of_band = tl.minimum(row_tiles - first_tile, BAND)
    index_in_band = tl.program_id(0) % band_size
    rows = (first_tile + index_in_band % tiles_of_band) * ROWS + tl.arange(0, ROWS)
    outputs = index_in_band // tiles_of_band * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, BLOCK)
    # rows and outputs beyond the end repeat the first one, which avoids a mask in the loop
    x_pointers = x + (tl.where(rows < num_rows, rows, 0).to(tl.int64) * SIZE)[:, None] + columns[None, :]
    weight_pointers = (
        weight + (tl.where(outputs < num_outputs, outputs, 0).to(tl.int64) * SIZE)[:, None] + columns[None, :]
    )
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, BLOCK):
        inside = (start + columns < SIZE)[None, :]
        vectors = loaded(x_pointers + start, inside, SIZE % BLOCK == 0)
        part = loaded(weight_pointers + start, inside, SIZE % BLOCK == 0)
        total = tl.dot(vectors, tl.trans(part), total, input_precision="ieee")
    is_output = (outputs < num_outputs)[None, :]
    if bias is not None:
        total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & is_output)


_matmul = KernelLauncher(_matmul_kernel)


def _num_tiles(num_rows: int, num_outputs: int, tile: Tile) -> int:
    return -(-num_rows // tile[0]) * -(-num_outputs // tile[1])


def tile_for(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """Return the largest tile size that still fills the GPU; SMALL if none does. fp32 has only one size."""
    if dtype == torch.float32:
        return FP32
    fitting = (tile for tile in (LARGE, MEDIUM) if _num_tiles(num_rows, num_outputs, tile) >= ENOUGH_TILES)
    return next(fitting, SMALL)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]; x and weight are contiguous."""
    num_outputs, size = weight.shape
    num_rows = x.shape[0]
    tile = tile or tile_for(num_rows, num_outputs, x.dtype)
    rows, outputs, block, num_stages, num_warps = tile
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    arguments = (x, weight, bias, out, num_rows, num_outputs, size, rows, outputs, block)
    key = x.dtype, weight.shape, tile, *alignments(x, weight, *(() if bias is None else (bias,)))
    grid = _num_tiles(num_rows, num_outputs, tile), 1, 1
    _matmul(grid, key, arguments, {"num_warps": num_warps, "num_stages": num_stages})
    return out


NARROW = 64, 64, 64, 4
"""(rows, outputs, inputs per block, warps) for 16-bit dtypes."""
WIDE = 32, 32, 32, 4
"""For fp32, which is multiplied without tensor cores."""


@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
    NUM_OUTPUTS: tl.constexpr, SIZE: tl.constexpr, X_ROW: tl.constexpr, X_HEAD: tl.constexpr, WEIGHT_HEAD: tl.constexpr,
    WEIGHT_INPUT: tl.constexpr, WEIGHT_OUTPUT: tl.constexpr, OUT_ROW: tl.constexpr, OUT_HEAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    head = tl.program_id(2).to(tl.int64)
    inputs = tl.arange(0, BLOCK)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    x_pointers = x + head * X_HEAD + (rows.to(tl.int64) * X_ROW)[:, None] + inputs[None, :]
    weight_pointers = (
        weight + head * WEIGHT_HEAD + (inputs * WEIGHT_INPUT)[:, None] + (outputs * WEIGHT_OUTPUT)[None, :]
    )
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, BLOCK):
        inside = start + inputs < SIZE
        vectors = tl.load(x_pointers + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & is_output[None, :]
        part = tl.load(weight_pointers + start * WEIGHT_INPUT, mask=mask, other=0.0)
        total = tl.dot(vectors, part, total, input_precision="ieee")
    targets = out + head * OUT_HEAD + (rows.to(tl.int64) * OUT_ROW)[:, None] + outputs[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


_heads = KernelLauncher(_heads_kernel)


def head_matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, I] by weight [H, I, O] into out [T, H, O]. The last dimension of x and out is contiguous."""
    num_rows = x.shape[0]
    num_heads, size, num_outputs = weight.shape
    rows, outputs, block, num_warps = WIDE if x.dtype == torch.float32 else NARROW
    sizes = num_outputs, size, *x.stride()[:2], *weight.stride(), *out.stride()[:2], rows, outputs, block
    tensors = x, weight, out
    key = x.dtype, sizes, *alignments(*tensors)
    grid = -(-num_rows // rows), -(-num_outputs // outputs), num_heads
    _heads(grid, key, (*tensors, num_rows, *sizes), {"num_warps": num_warps})
