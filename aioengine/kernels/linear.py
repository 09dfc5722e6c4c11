"""Matrix product with weights that never change: x [T, I], weight [O, I], bias [O] -> [T, O].

On the CPU a row of the result is the same bits whatever T is. How a library adds up a row can depend on T (one row is
often done by another kernel than many), so it is found out by trying from how many rows on it does not, and fewer
rows are padded to that many, with copies of themselves. Where no such number is found, rows are worked on in blocks
of ``BLOCK``. On a GPU that holds where it is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from aioengine.kernels import _triton

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
FAST_ROWS = 4
"""oneDNN reads packed bf16 weights fastest with 3 to 6 rows: 31 GB/s with one row, 26 with two, 37 with four, on two
cores that can read 38. So fewer rows are padded to four where the weight does not fit the cache.
"""
CACHED_BYTES = 1 << 20
LONG_INPUTS = 8192
FEW_ROWS_OF_LONG_INPUTS = 128
TRIED_ROWS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 17, 32, 33, BLOCK)


class Product(Protocol):
    """[T, I] -> [T, O]; holds its weight."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Prepare(Protocol):
    """Weight and bias -> what is computed with them."""

    def __call__(self, weight: Tensor, bias: Tensor | None, *, batch_invariant: bool = False) -> Product: ...


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed weights are taken: on the CPU, for the types that it multiplies there."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepare(weight: Tensor, bias: Tensor | None, *, batch_invariant: bool = False) -> Product:
    """The product with this weight in the fastest form there is; the weight may be copied and is needed no more.

    ``batch_invariant``: of the forms for a GPU, one whose rows do not depend on their number.
    """
    if weight.device.type != "cpu":
        return _invariant(weight, bias) if batch_invariant else _on_device(weight, bias)
    product = _fastest(weight, bias)
    out_features, in_features = weight.shape
    min_rows = independent_from(out_features, in_features, weight.dtype, torch.get_num_threads())
    if min_rows is None:
        return _blocked(product)
    if weight.dtype == torch.bfloat16 and packs(weight.dtype, weight.device) and weight.nbytes > CACHED_BYTES:
        min_rows = max(min_rows, FAST_ROWS)
    return product if min_rows == 1 else _padded(product, min_rows)


@lru_cache(maxsize=256)
def independent_from(out_features: int, in_features: int, dtype: torch.dtype, num_threads: int) -> int | None:
    """From how many rows on a row's result is seen not to depend on their number; None: from none that was tried.

    ``num_threads`` only tells apart what was tried with other numbers of threads.
    """
    generator = torch.Generator().manual_seed(num_threads)
    some = torch.randn(min(out_features, 64), in_features, generator=generator).to(dtype)
    product = _fastest(some.repeat(-(-out_features // some.shape[0]), 1)[:out_features].contiguous(), None)
    x = torch.randn(BLOCK, in_features, generator=generator).to(dtype)
    expected = product(x)
    first = None
    for num_rows in reversed(TRIED_ROWS):
        if not torch.equal(product(x[:num_rows]), expected[:num_rows]):
            break
        first = num_rows
    return first


def _fastest(weight: Tensor, bias: Tensor | None) -> Product:
    if not packs(weight.dtype, weight.device):
        return lambda x: functional.linear(x, weight, bias)
    operation = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return lambda x: operation(x, packed, bias, "none", [], "")


def _on_device(weight: Tensor, bias: Tensor | None) -> Product:
    """One row and few rows go through kernels that read the weight at full speed, more through torch's library."""
    if not _triton.serves(weight) or not weight.is_contiguous():
        return lambda x: functional.linear(x, weight, bias)
    from aioengine.kernels import _triton_skinny, _triton_vector

    num_outputs, size = weight.shape
    is_narrow = weight.dtype != torch.float32
    num_done = torch.zeros(_triton_skinny.num_tiles(num_outputs), dtype=torch.int32, device=weight.device)
    by_library = _by_library(weight, bias)

    def product(x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows <= _triton_skinny.MAX_ROWS and x.is_contiguous():
            if num_rows == 1:
                return _triton_vector.product(x, weight, bias)
            programs = _triton_skinny.shape_of_programs(num_outputs, size, num_rows) if is_narrow else None
            if programs is not None:
                return _triton_skinny.product(x, weight, bias, programs=programs, num_done=num_done)
        return by_library(x)

    return product


def _by_library(weight: Tensor, bias: Tensor | None) -> Product:
    """What torch calls for a product with a bias shares out long inputs better, for few rows: with a bias of zeros a
    layer of a model of 8 billion parameters takes 3 of 230 us less.
    """
    if bias is not None or weight.shape[1] < LONG_INPUTS or weight.dtype == torch.float32:
        return lambda x: functional.linear(x, weight, bias)
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return lambda x: functional.linear(x, weight, zeros if x.shape[0] <= FEW_ROWS_OF_LONG_INPUTS else None)


def _invariant(weight: Tensor, bias: Tensor | None) -> Product:
    from aioengine.kernels import _triton_invariant

    invariant_product, whole = _triton_invariant.product, weight.contiguous()
    return lambda x: invariant_product(x.contiguous(), whole, bias)


def _padded(product: Product, min_rows: int) -> Product:
    def padded(x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows >= min_rows:
            return product(x)
        copies = -(-min_rows // num_rows)
        return product(torch.cat((x,) * copies))[:num_rows]

    return padded


def _blocked(product: Product) -> Product:
    def blocked(x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -num_rows % BLOCK))
        return torch.cat([product(block) for block in padded.split(BLOCK)])[:num_rows]

    return blocked
