"""Product of a matrix with few vectors on a GPU: x [T, I] with T up to 32, weight [O, I], bias [O] -> [T, O].

The time is that of reading the weight. Each program takes some outputs and a share of the inputs; where the inputs are
shared out, the parts are added up by a second kernel, always in the same order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aioengine.kernels._triton import Launcher, has_dependent_launch, options

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 32
Programs = tuple[int, int, int, int, int]


@triton.jit
def _skinny_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * SHARE
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    is_row = rows[:, None] < num_rows
    is_output = outputs[None, :] < num_outputs
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    x_places = x + rows[:, None] * SIZE + first + columns[None, :]
    places = weight + outputs[None, :].to(tl.int64) * SIZE + first + columns[:, None]
    for start in tl.range(0, SHARE, BLOCK, num_stages=STAGES):
        part = tl.load(places + start, mask=is_output, other=0.0)
        vectors = tl.load(x_places + start, mask=is_row, other=0.0)
        total = tl.dot(vectors, part, total, input_precision="ieee")  # not tf32 where they are fp32
    if IS_WHOLE:
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
        inside = is_row & (outputs[None, :] < num_outputs)
        target = out + rows[:, None] * num_outputs + outputs[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    else:
        inside = is_row & (outputs[None, :] < num_outputs)
        part_out = out + tl.program_id(1) * num_rows * num_outputs
        tl.store(part_out + rows[:, None] * num_outputs + outputs[None, :], total, mask=inside)


@triton.jit
def _sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    size: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size + places, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + places % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


_skinny = Launcher(_skinny_kernel)
_sum = Launcher(_sum_kernel)


@lru_cache(maxsize=256)
def shape_of_programs(num_outputs: int, size: int) -> Programs | None:
    """(outputs of a program, block of inputs, shares of the inputs, stages, warps); None: torch's library is faster.

    Measured on an H200 for the layers of models of 0.6 and 8 billion parameters.
    """
    if size % 512 or 4096 < num_outputs < 65_536:
        return None
    if num_outputs > 4096:
        return 64, 128, 1, 4, 4
    if num_outputs <= 1024:
        return 32, 128, 4, 4, 4
    return (32, 256, 1, 6, 4) if size <= 1024 else (64, 128, 2, 6, 4)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, programs: Programs) -> Tensor:
    """``programs``: as ``shape_of_programs`` gives them."""
    num_outputs, size = weight.shape
    num_rows = x.shape[0]
    outputs, block, shares, stages, num_warps = programs
    rows = 16 if num_rows <= 16 else MAX_ROWS
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    is_whole = shares == 1
    target = out if is_whole else torch.empty((shares, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    some_bias = weight if bias is None else bias
    has_bias, is_dependent = bias is not None, has_dependent_launch()
    arguments = (
        *(x, weight, some_bias, target, num_rows, num_outputs, size, size // shares, rows, outputs, block, stages),
        *(has_bias, is_whole, is_dependent),
    )
    key = (x.dtype, weight.shape, programs, rows, num_rows % 16, num_rows == 1, has_bias, x.data_ptr() % 16)
    _skinny((-(-num_outputs // outputs), shares, 1), key, arguments, options(num_warps))
    if not is_whole:
        total = num_rows * num_outputs
        sum_key = (x.dtype, num_outputs, total % 16, shares, has_bias)
        sum_arguments = (target, some_bias, out, num_outputs, total, shares, 1024, has_bias, is_dependent)
        _sum((-(-total // 1024), 1, 1), sum_key, sum_arguments, options(4))
    return out
