"""Gated matmul of up to 128 rows with a large weight on a GPU: x [T, I], weight [O, I] -> silu(gate) * up [T, O / 2].

The gate lines of the weight come first. A program computes gate and up of some outputs for all rows, so that only the
activated result is written. Tiles are loaded by TMA (Hopper and newer). The weight is the left operand, so that its
outputs are the rows of the tensor core instruction. The rows of x are padded to a power of 2, or to the sum of two
powers of 2.

Sums: in fp32, from the first to the last input, as in ``invariant_linear``. So the bits do not depend on T.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aioengine.kernels.triton.activation import activated
from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import compile_only, kernel, options

MAX_GATED_ROWS = {8192: 128, 7168: 64}
"""Minimum outputs -> rows up to which this kernel is faster. An 8B model has 14,336, or 7,168 on one of two GPUs."""
GatedPrograms = tuple[int, int, int, int, int, int]
"""(outputs per program, inputs per block, stages, warps, rows, more rows)."""

PROGRAMS: dict[int, GatedPrograms] = {
    16: (64, 128, 3, 4, 16, 0),
    32: (64, 128, 3, 4, 32, 0),
    64: (64, 128, 3, 4, 64, 0),
    80: (128, 64, 4, 8, 64, 16),
    96: (128, 64, 4, 8, 64, 32),
    128: (128, 64, 4, 8, 128, 0),
}
"""Maximum rows -> programs. In decode steps of an 8B model on an H200, a layer takes 1 us less with 8 rows, 2 us with
64, and 7 of 230 us with 128. With more rows, torch's matmul with a separate activation is as fast.
"""


@triton.jit
def _store(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, outputs: tl.tensor, rows: tl.tensor, num_outputs: tl.tensor,
    num_rows: tl.tensor,
) -> None:  # fmt: skip
    """Activate and store."""
    active = activated(gate, up, out.dtype.element_ty)
    outputs, rows = outputs[:, None], rows[None, :]
    tl.store(out + rows * num_outputs + outputs, active, mask=(rows < num_rows) & (outputs < num_outputs))


@kernel(do_not_specialize=["num_rows"])  # row counts with the same programs share a specialization
def _gated_kernel(
    x: tl.tensor, x_more: tl.tensor, weight: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``OUTPUTS`` results of ROWS + MORE rows. x, x_more: the same tensor, loaded in tiles of these sizes."""
    first = tl.program_id(0) * OUTPUTS
    start_next_and_wait()
    gate, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
    if MORE > 0:
        gate_more, up_more = tl.zeros((OUTPUTS, MORE), tl.float32), tl.zeros((OUTPUTS, MORE), tl.float32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        gate_part, up_part = weight.load([first, start]), weight.load([num_outputs + first, start])
        vectors = x.load([0, start]).T
        gate = tl.dot(gate_part, vectors, gate)
        up = tl.dot(up_part, vectors, up)
        if MORE > 0:
            more_vectors = x_more.load([ROWS, start]).T
            gate_more = tl.dot(gate_part, more_vectors, gate_more)
            up_more = tl.dot(up_part, more_vectors, up_more)
    outputs = first + tl.arange(0, OUTPUTS)
    _store(gate, up, out, outputs, tl.arange(0, ROWS), num_outputs, num_rows)
    if MORE > 0:
        _store(gate_more, up_more, out, outputs, ROWS + tl.arange(0, MORE), num_outputs, num_rows)


@lru_cache(maxsize=256)
def shape_of_programs(num_outputs: int, size: int, num_rows: int) -> GatedPrograms | None:
    """Return the programs for the fused kernel; None: it does not support the sizes, or separate kernels are faster."""
    max_rows = next((rows for outputs, rows in MAX_GATED_ROWS.items() if num_outputs >= outputs), 0)
    if size % 64 or num_rows == 1 or num_rows > max_rows:
        return None
    return next(programs for max_rows, programs in PROGRAMS.items() if num_rows <= max_rows)


def compile_specializations(weight: Tensor) -> None:
    """Compile all specializations for weight [O, I]."""
    with compile_only():
        for num_rows in PROGRAMS:
            programs = shape_of_programs(weight.shape[0] // 2, weight.shape[1], num_rows)
            if programs is not None:
                matmul(weight.new_empty(num_rows, weight.shape[1]), weight, programs)


def matmul(x: Tensor, weight: Tensor, programs: GatedPrograms) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O / 2]; both are contiguous and aligned to 16 bytes."""
    outputs, block, stages, num_warps, rows, more = programs
    num_rows, size = x.shape
    num_outputs = weight.shape[0] // 2
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiles = [TensorDescriptor.from_tensor(x, [tile_rows, block]) for tile_rows in (rows, more or rows)]
    tiles.append(TensorDescriptor.from_tensor(weight, [outputs, block]))
    arguments = (*tiles, out, num_rows, num_outputs, size, rows, more, outputs, block, stages)
    key = x.dtype, weight.shape, programs
    _gated_kernel((-(-num_outputs // outputs), 1, 1), key, arguments, options(num_warps))
    return out
