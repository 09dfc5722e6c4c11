"""Batch-invariant matmuls per head on a GPU: x [T, H, I], weight [H, I, O] -> [T, H, O].

As in ``kernels/triton/invariant_linear.py``, each element is summed over the inputs from first to last. All tiles have
the same size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import KernelLauncher, alignments

NARROW = 64, 64, 64, 4
"""(rows, outputs, inputs per block, warps) for 16-bit dtypes."""
WIDE = 32, 32, 32, 4
"""For fp32, which is multiplied without tensor cores."""


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
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


_matmul = KernelLauncher(_matmul_kernel)


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, I] by weight [H, I, O] into out [T, H, O]. The last dimension of x and out is contiguous."""
    num_rows = x.shape[0]
    num_heads, size, num_outputs = weight.shape
    rows, outputs, block, num_warps = WIDE if x.dtype == torch.float32 else NARROW
    sizes = num_outputs, size, *x.stride()[:2], *weight.stride(), *out.stride()[:2], rows, outputs, block
    tensors = x, weight, out
    key = x.dtype, sizes, *alignments(*tensors)
    grid = -(-num_rows // rows), -(-num_outputs // outputs), num_heads
    _matmul(grid, key, (*tensors, num_rows, *sizes), {"num_warps": num_warps})
