"""Kernels for chunks of attention on a CPU, and trials that show how they are batch-invariant.

A kernel returns the output of a chunk and the logarithm of its sum of exponentials, so that ``merge`` can combine
chunks.

There are two kernels. ``attend_by_products`` computes in fp32 with MKL, and full blocks of a prompt with oneDNN, which
is twice as fast where MKL does not use AVX-512. Both give the same bits if they split sums in the same way. ``attend``
calls torch's fused kernel. It is used if the bits differ, on CPUs where it is faster (``_has_fast_products``), and for
small models (``SMALL_SIZE``).

B rows or 1, H kv heads, M padded query rows per kv head, C positions of a chunk, E head size, X chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape
from aioengine.attention._cpu_units import CHUNK, MASKED
from aioengine.kernels import linear

ChunkResult = tuple[Tensor, Tensor]
"""The result of one chunk: outputs [..., M, E] and logarithms of the sums of exponentials [..., M]."""
Kernel = Callable[..., ChunkResult]
"""Attends with queries [B, H, M, E] to keys, values [B, H, C, E].

Keywords:
    mask: [1 or B, 1, 1 or M, C], added to the scores; None: no position is hidden.
    scale: factor of the scores.
    is_full_block: M is the number of rows of most blocks of prompts, and ``mask`` is not [B, ...].
    needs_sums: otherwise the returned sums may be anything.
"""
PIECE = 192
"""MKL computes the sums of longer rows in pieces of this length."""


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scale: float, **_: bool
) -> ChunkResult:
    """Implement ``Kernel`` with torch's fused kernel: queries [B, H, M, E]."""
    result: ChunkResult = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return result


def attend_by_products(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    is_full_block: bool = False,
    needs_sums: bool = True,
) -> ChunkResult:
    """Implement ``Kernel`` in fp32 with matrix products and torch's softmax: queries [B, H, M, E].

    oneDNN only computes full blocks, because it compiles code for each M. A ``mask`` with fewer rows is repeated.
    """
    shape = queries.shape[:2]
    queries = queries.float() if scale == 1.0 else queries.float() * scale
    keys, values = keys.float(), values.float()
    if not is_full_block:
        queries, keys, values = (part.flatten(0, 1) for part in (queries, keys, values))
        scores = torch.bmm(queries, keys.transpose(1, 2)).unflatten(0, shape)
        weights, sums = _to_weights(scores, mask, needs_sums=needs_sums)
        return torch.bmm(weights.flatten(0, 1), values).unflatten(0, shape), sums
    outputs, sums = queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3])
    for index in product(range(queries.shape[0]), range(queries.shape[1])):
        scores = _product(queries[index], keys[index])
        weights, sums[index] = _to_weights(scores[None, None], mask, needs_sums=needs_sums)
        for begin in range(0, weights.shape[3], PIECE):
            piece = slice(begin, begin + PIECE)
            part = _product(weights[0, 0, :, piece], values[index][piece].t())
            outputs[index] = part if begin == 0 else part.add_(outputs[index])
    return outputs, sums


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [M, I] with a weight [O, I] by oneDNN -> [M, O]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def _to_weights(scores: Tensor, mask: Tensor | None, *, needs_sums: bool) -> tuple[Tensor, Tensor]:
    """Return the softmax of scores [B, H, M, C] and the logarithms of the sums of exponentials [B, H, M].

    The exponential of the largest score is 1, so the largest weight is the inverse of the sum.
    """
    if mask is not None and mask.shape[2] == 1:
        scores.add_(mask)
    elif mask is not None:
        scores.unflatten(2, (-1, mask.shape[2])).add_(mask.unsqueeze(2))
    if not needs_sums:
        return torch.softmax(scores, -1), scores.select(-1, 0)
    largest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return scores, largest.sub_(scores.amax(-1).log_())


def merge(outputs: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge outputs of chunks [X, ..., E] by the logarithms of their sums of exponentials [X, ...] -> [..., E].

    outputs: fp32, overwritten. sinks: learned sinks, broadcast to the shape of sums[0]. They come first.
    """
    if sinks is not None:
        sink_sums = torch.broadcast_to(sinks, sums.shape[1:]).unsqueeze(0)
        outputs, sums = torch.cat((torch.zeros_like(outputs[:1]), outputs)), torch.cat((sink_sums, sums))
    weights = torch.exp(sums - sums.amax(0))
    weights = weights.div_(_sum_by_halves(weights.clone()))
    return _sum_by_halves(outputs.mul_(weights.unsqueeze(-1)))


def _sum_by_halves(terms: Tensor) -> Tensor:
    """Sum [X, ...] over the first axis in place -> [...]. Trailing zeros do not change a bit of the sum."""
    count = terms.shape[0]
    while count > 1:
        half = 1 << (count - 1).bit_length() - 1
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]


# Trials


SMALL_SIZE = 512
"""Models with fewer outputs of all query heads are small."""
TRIED_ROWS = (4, 8, 16)
"""Candidates for ``KernelLimits.rows``. Each is tried with these multiples of it."""
TRIED_TIMES = (1, 2, 3, 5, 9, 12)
TRIED_WIDTHS = tuple(range(32, CHUNK, 32))
"""Candidates for ``KernelLimits.widths``."""
MANY_ROWS = 200
"""Query rows of a trial. Above 192 rows, torch's kernel uses another block size."""
TRIED_OFFSETS = (0, 16, 37)
"""Indices of a row among many: without AVX-512, results depend on the index."""
TRIED_SCALE = 0.05
LARGE = 64
"""The factor of large queries."""


class KernelLimits(NamedTuple):
    """How the kernel may be called.

    Attributes:
        rows: the number of query rows must be a multiple of this.
        widths: allowed numbers of positions of a chunk.
        attend: the kernel.
    """

    rows: int
    widths: tuple[int, ...]
    attend: Kernel


def limits_of(shape: AttentionShape, dtype: torch.dtype) -> KernelLimits | None:
    """Return the limits of the kernel for this shape, or None."""
    is_small = shape.num_heads * shape.head_size < SMALL_SIZE
    return find_limits(shape.head_size, dtype, torch.get_num_threads(), is_small=is_small)


@lru_cache(maxsize=64)
def find_limits(head_size: int, dtype: torch.dtype, num_threads: int, *, is_small: bool = False) -> KernelLimits | None:
    """Return the limits with which a kernel is batch-invariant in trials, or None.

    Args:
        num_threads: only part of the cache key, because the trials depend on it.
        is_small: a decode step takes about as long as its calls of operators, so the kernel with fewer calls is used.
    """
    kernels = (attend_by_products, attend) if not is_small and _has_fast_products(dtype) else (attend,)
    for kernel, rows in product(kernels, TRIED_ROWS):
        matches = partial(_matches, kernel, rows, head_size=head_size, dtype=dtype)
        if matches(CHUNK):
            return KernelLimits(rows, (*(width for width in TRIED_WIDTHS if matches(width)), CHUNK), kernel)
    return None


def _has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether products in fp32 are as fast as torch's fused kernel.

    The fused kernel uses the matrix unit for bf16, and with AVX2 takes half the time of products in fp32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return not linear.has_matrix_unit()


def _matches(kernel: Kernel, rows: int, width: int, *, head_size: int, dtype: torch.dtype) -> bool:
    """Return whether multiples of ``rows`` queries over ``width`` positions give the bits of many over a full chunk.

    The values of the second half of the positions cancel the values of the first half. Only the rounding error remains,
    which reveals another summation order. A row of large queries attends to one key, which reveals its score.
    """
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 2, MANY_ROWS, head_size, generator=generator).to(dtype)
    queries[:, :, ::2] *= LARGE
    keys, values = torch.randn(2, 2, 2, CHUNK, head_size, generator=generator).to(dtype)
    half = width // 2
    keys[:, :, half:width] = keys[:, :, :half]
    values[:, :, half:width] = -values[:, :, :half]
    mask = ((torch.arange(CHUNK) >= width) * MASKED).view(1, 1, 1, -1)
    needed = None if width == CHUNK else mask  # a mask of zeros changes no bit
    expected = kernel(queries, keys, values, mask=needed, scale=TRIED_SCALE, is_full_block=True)
    for times, (batch, heads), offset in product(TRIED_TIMES, ((1, 1), (1, 2), (2, 2)), TRIED_OFFSETS):
        inside = slice(offset, offset + rows * times)
        few = queries[:batch, :heads, inside].contiguous()
        cut_keys, cut_values = keys[:batch, :heads, :width], values[:batch, :heads, :width]
        result = kernel(few, cut_keys, cut_values, mask=mask[..., :width], scale=TRIED_SCALE)
        for part, full in zip(result, expected, strict=True):
            if not torch.equal(part, full[:batch, :heads, inside]):
                return False
    return True
