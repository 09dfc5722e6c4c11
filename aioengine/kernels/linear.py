"""Matmul with constant weights: x [T, I], weight [O, I], bias [O] -> [T, O].

On a CPU a row of the result has the same bits for every T. Libraries may sum a row in an order that depends on T: one
row often uses another kernel than many, and matrix units split the columns into other blocks. With several threads, a
library may divide a long sum among them. So each weight shape is tried at the start with some row counts. Later, rows
are padded with copies or split to counts that give equal bits:

- fp32 weights that fp16 holds, where torch has FBGEMM and oneDNN: see ``half_linear``.
- Other weights in bf16 and fp32, if oneDNN supports them (``uses_onednn``): ``TILED_COUNTS`` are tried, and the counts
  that agree are used. If the weights are packed (all but bf16 with a matrix unit), and only counts below
  ``COMMON_ROWS`` differ, all ``PADDED_COUNTS`` above them are used. If few counts agree in bf16, the matmul runs in
  fp32.
- Other dtypes: ``TRIED_PLAIN_COUNTS`` are tried. If n is the largest count that differs, all counts from the next tried
  count after n on are used.

If no counts agree, rows are computed one by one. On a GPU, results are independent of T only with ``batch_invariant``.

On a CPU with a matrix unit for bf16 (AMX), weights stay as they are, and the outputs are the rows of the product:
weight times x.t(), transposed back. The unit then reads the weight sequentially. Packed weights with the same bits for
most row counts take up to 1.6 times as long with one row, if the CPU runs below its full speed.

oneDNN compiles code for each pair of row count and weight shape, at least 0.5 MB in 0.5 to 4 ms, and keeps it. So using
few row counts also saves memory and time. ``child_process.host.limit_kernel_cache`` limits the cached code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels import half_linear
from aioengine.kernels.half_linear import HalfWeight
from aioengine.kernels.row_counts import COMMON_ROWS, MAX_PLAIN_ROWS, MAX_TRIED_ELEMENTS, Matmul, Trial, in_pieces

_Weight = TypeVar("_Weight")


def uses_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN computes matmuls in this dtype on this device, a CPU."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def transposes(dtype: torch.dtype) -> bool:
    """Return whether a matmul in this dtype on a CPU multiplies the weight, which is not packed, with x.t()."""
    return dtype == torch.bfloat16 and has_matrix_unit()


def pack(weight: Tensor, *, has_bias: bool = False) -> Tensor | HalfWeight:
    """Return the weight [O, I] in the layout of the library that ``prepare`` uses, or the weight itself."""
    if weight.is_mkldnn or not uses_onednn(weight.dtype, weight.device) or transposes(weight.dtype):
        return weight
    half = half_linear.pack(weight)
    if half is not None:
        return half
    out_features, in_features = weight.shape
    choice = choose_matmul(out_features, in_features, weight.dtype, torch.get_num_threads(), has_bias=has_bias)
    return _pack(weight) if choice.dtype == weight.dtype else weight


def unpack(weight: Tensor | HalfWeight) -> Tensor:
    """Undo ``pack``: return an equal plain tensor [O, I] if the weight is packed, else the weight itself."""
    if isinstance(weight, HalfWeight):
        return weight.restore()
    return weight.to_dense() if weight.is_mkldnn else weight


def prepare(weight: Tensor | HalfWeight, bias: Tensor | None, *, batch_invariant: bool = False) -> Matmul:
    """Return the fastest callable [T, I] -> [T, O] for weight [O, I] and bias [O].

    Args:
        weight: the result of ``pack``, or a plain tensor. A plain tensor may be copied; the caller can then free it.
        batch_invariant: on a GPU, a row of the result must not depend on the number of rows.
    """
    if isinstance(weight, Tensor):
        if weight.device.type != "cpu":
            return _on_device(weight, bias, batch_invariant=batch_invariant)
        weight = pack(weight, has_bias=bias is not None)
    if isinstance(weight, HalfWeight):
        return half_linear.prepare(weight, bias)
    out_features, in_features = weight.shape
    num_threads = torch.get_num_threads()
    if not uses_onednn(weight.dtype, weight.device):
        counts = independent_rows(out_features, in_features, weight.dtype, num_threads)
        return in_pieces(_torch_matmul(weight, bias), tuple(counts) or (1,))
    choice = choose_matmul(out_features, in_features, weight.dtype, num_threads, has_bias=bias is not None)
    if choice.dtype != weight.dtype:
        wide = prepare(weight.to(choice.dtype), None if bias is None else bias.to(choice.dtype))
        return lambda x: wide(x.to(choice.dtype, memory_format=torch.contiguous_format)).to(x.dtype)
    if not transposes(weight.dtype):
        return in_pieces(_onednn_matmul(weight, bias), choice.counts)
    matmul = in_pieces(_transposed_matmul(weight, bias), choice.counts)
    return lambda x: transpose_back(matmul(x))


def prepare_gated(weight: Tensor, bias: Tensor | None, activation: Matmul) -> Matmul | None:
    """Return ``activation`` of the matmul: [T, I] -> [T, O / 2]; None: it is not faster than separate calls.

    It is faster where ``prepare`` transposes its results back. Those of this matmul keep the strides (1, T).
    """
    if weight.device.type != "cpu" or not transposes(weight.dtype):
        return None
    choice = choose_matmul(*weight.shape, weight.dtype, torch.get_num_threads(), has_bias=bias is not None)
    if choice.dtype != weight.dtype:
        return None
    matmul = _transposed_matmul(weight, bias)
    return in_pieces(lambda x: activation(matmul(x)), choice.counts)


class PreparedMatmul(NamedTuple, Generic[_Weight]):
    """A matmul [T, I] -> [T, O], and how its weight can be replaced.

    Attributes:
        restore: returns a weight that gives the same results.
        update: replaces weight and bias [O] at the addresses that CUDA graphs contain; None: prepare again instead.
        gated: [T, I] -> silu(first half of the outputs) * (second half), [T, O / 2]; None: no kernel fuses this.
    """

    matmul: Matmul
    restore: Callable[[], _Weight]
    update: Callable[[_Weight, Tensor | None], None] | None = None
    gated: Matmul | None = None


class MatmulChoice(NamedTuple):
    """How a weight is multiplied.

    Attributes:
        counts: the row counts that give the same bits, ascending.
        dtype: dtype of the matmul.
    """

    counts: tuple[int, ...]
    dtype: torch.dtype


PADDED_COUNTS = (
    *(*range(1, 9), 10, 12, 14, 16, *range(20, 65, 4)),
    *(*range(72, 129, 8), *range(144, 257, 16), *range(288, 513, 32)),
)
"""Row counts of a matmul with a packed weight. Padding adds 4 % of rows on average."""
TILED_COUNTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Row counts that are tried with each weight. A matrix unit for bf16 uses no others, and above ``TILE_ROWS`` only its
multiples: 24 rows take as long as 32.
"""
TILE_ROWS = 16
"""Rows that a matrix unit for bf16 multiplies in the time of one."""
MIN_LARGEST_COUNT = 16
"""If the largest usable row count is smaller, another dtype is tried."""
CACHED_BYTES = 1 << 20
"""Smaller weights stay in the cache, so no row counts are slow."""


@lru_cache(maxsize=256)
def choose_matmul(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int, *, has_bias: bool = False
) -> MatmulChoice:
    """Return the row counts and the dtype of the matmul.

    They are those of ``dtype`` if enough row counts agree, else those of fp32, else one row at a time in fp32.

    num_threads: only part of the cache key, because the trials depend on it.
    """
    for tried in dict.fromkeys((dtype, torch.float32)):
        counts = _agreeing_counts(out_features, in_features, tried, has_bias=has_bias)
        if counts and counts[-1] >= MIN_LARGEST_COUNT:
            return MatmulChoice(counts, tried)
    return MatmulChoice((1,), torch.float32)


def _agreeing_counts(out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool) -> tuple[int, ...]:
    """Return the row counts that give the same bits in the trials, ascending."""
    slow: Sequence[int] = ()
    if dtype == torch.bfloat16 and not transposes(dtype) and 2 * out_features * in_features > CACHED_BYTES:
        slow = slow_counts(torch.get_num_threads())
    max_count = max(MAX_PLAIN_ROWS, MAX_TRIED_ELEMENTS // out_features)
    step = TILE_ROWS if transposes(dtype) else 1
    counts = [n for n in TILED_COUNTS if n not in slow and n <= max_count and (n < step or n % step == 0)]
    trial = Trial(out_features, in_features, dtype)
    matmul = (_transposed_matmul if transposes(dtype) else _onednn_matmul)(
        trial.weight, trial.bias if has_bias else None
    )

    def of_columns(x: Tensor) -> Tensor:
        """Multiply x [T, I] in the layout of a part of the results of ``prepare_gated``."""
        return matmul(torch.cat((x, x)).t().contiguous()[:, : len(x)].t())

    others = (of_columns,) if transposes(dtype) else ()
    agreeing = tuple(filter(trial.agreement_test(matmul, COMMON_ROWS, *others), counts))
    differing = max({*counts} - {*agreeing}, default=0)
    if transposes(dtype) or differing >= COMMON_ROWS:
        return agreeing
    return tuple(count for count in PADDED_COUNTS if count not in slow and count > differing)


FAST_ROWS = 4
"""With 3 to 6 rows, oneDNN reads packed bf16 weights at the rate of memory. With fewer rows it is slower on some CPUs
(31 GB/s with one row, 26 with two, 37 with four, on two cores of Zen 4), and faster on others (Zen 5).
"""
TIMED_SHAPE = (1 << 14, 1 << 11)
"""The weight with which row counts are timed. It is larger than most caches."""
NUM_TIMED = 5
"""Runs of each row count. The first one compiles, and the fastest of the others counts."""
TOO_SLOW = 1.1
"""Row counts are not used if they take this many times as long as ``FAST_ROWS``."""


@lru_cache(maxsize=8)
def slow_counts(num_threads: int) -> tuple[int, ...]:
    """Return the row counts below ``FAST_ROWS`` with which a bf16 weight in memory takes ``TOO_SLOW`` times as long.

    The choice changes no bits: only row counts with equal bits are used. num_threads: only part of the cache key.
    """
    counts = range(1, FAST_ROWS + 1)
    matmul = _onednn_matmul(torch.ones(TIMED_SHAPE, dtype=torch.bfloat16), None)
    inputs = [torch.ones(count, TIMED_SHAPE[1], dtype=torch.bfloat16) for count in counts]
    seconds = [[_seconds(matmul, x) for x in inputs] for _ in range(NUM_TIMED)][1:]
    *few, fast = (min(times) for times in zip(*seconds, strict=True))
    return tuple(count for count, time in zip(counts, few, strict=False) if time > TOO_SLOW * fast)


def _seconds(matmul: Matmul, x: Tensor) -> float:
    """Return the seconds that ``matmul`` takes for x [T, I]."""
    started = perf_counter()
    matmul(x)
    return perf_counter() - started


def has_matrix_unit() -> bool:
    """Return whether this CPU has a matrix unit for bf16 (AMX)."""
    return torch.cpu._is_amx_tile_supported()


TRIED_PLAIN_COUNTS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 17, 32, 33, MAX_PLAIN_ROWS)
"""Row counts that are tried with a weight that is not packed."""


@lru_cache(maxsize=256)
def independent_rows(out_features: int, in_features: int, dtype: torch.dtype, num_threads: int) -> range:
    """Return the range of row counts that give equal bits in the trials; empty: there are none.

    num_threads: only part of the cache key, because the trials depend on it.
    """
    trial = Trial(out_features, in_features, dtype)
    agrees = trial.agreement_test(_torch_matmul(trial.weight, None), MAX_PLAIN_ROWS)
    first = MAX_PLAIN_ROWS + 1
    for num_rows in reversed(TRIED_PLAIN_COUNTS):
        if not agrees(num_rows):
            break
        first = num_rows
    return range(first, MAX_PLAIN_ROWS + 1)


def _torch_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """Return torch's matmul for weight [O, I] and bias [O]."""
    return lambda x: functional.linear(x, weight, bias)


def _transposed_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """Return the matmul that computes weight [O, I] times x.t(), plus bias [O]. Its results have strides (1, T)."""
    column = None if bias is None else bias.unsqueeze(1)

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if x.shape[0] == 1:  # a vector: one row as a matrix would use another kernel
            vector = x.view(-1)
            return (torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)).view(1, -1)
        return (torch.mm(weight, x.t()) if column is None else torch.addmm(column, weight, x.t())).t()

    return matmul


TRANSPOSED_OUTPUTS = 64
"""Outputs that are transposed back at a time. torch alone transposes a large matrix at a third of this speed."""
FEW_ELEMENTS = 1 << 15
"""With fewer elements, torch alone is faster."""


def transpose_back(rows: Tensor) -> Tensor:
    """Return rows [T, O], whose strides may be (1, T), in the usual layout."""
    if rows.is_contiguous():
        return rows
    num_rows, num_outputs = rows.shape
    columns = rows.t()
    if rows.numel() < FEW_ELEMENTS or num_outputs % TRANSPOSED_OUTPUTS or not columns.is_contiguous():
        return rows.contiguous()
    blocks = columns.view(-1, TRANSPOSED_OUTPUTS, num_rows).transpose(1, 2).contiguous()
    return blocks.transpose(0, 1).reshape(num_rows, num_outputs)


def _pack(weight: Tensor) -> Tensor:
    """Return the weight [O, I] in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def _onednn_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """Return oneDNN's matmul for weight [O, I], packed or plain, and bias [O]."""
    operation = torch.ops.mkldnn._linear_pointwise.default
    packed = weight if weight.is_mkldnn else _pack(weight)
    return lambda x: operation(x, packed, bias, "none", [], "")


class DeviceMatmul:
    """Matmul for weight [O, I] and bias [O] on a GPU. Up to 64 rows use our own kernels where these are faster: they
    read the weight at full bandwidth.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: contiguous [O, I]. bias: [O]."""
        from aioengine.kernels.triton import skinny_linear

        self.weight = weight
        self.bias = bias
        self._has_16_bits = weight.dtype != torch.float32
        num_tiles = skinny_linear.num_tiles(weight.shape[0])
        self._num_done = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
        self._library_matmul = _library_matmul(weight, bias)
        self._kernels = skinny_linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        num_rows = x.shape[0]
        if num_rows <= self._kernels.SKINNY_ROWS and x.is_contiguous():
            if num_rows == 1:
                return self._kernels.vector_matmul(x, self.weight, self.bias)
            programs = self._kernels.shape_of_programs(*self.weight.shape, num_rows) if self._has_16_bits else None
            if programs is not None:
                return self._kernels.matmul(x, self.weight, self.bias, programs=programs, num_done=self._num_done)
        return self._library_matmul(x)


def _on_device(weight: Tensor, bias: Tensor | None, *, batch_invariant: bool) -> Matmul:
    """Return the fastest matmul for weight [O, I] and bias [O] on a GPU."""
    if batch_invariant:
        from aioengine.kernels.triton.invariant_linear import InvariantMatmul

        return InvariantMatmul(weight.contiguous(), bias)
    if not weight.is_contiguous():
        return _torch_matmul(weight, bias)
    return DeviceMatmul(weight, bias)


ZERO_BIAS_ROWS = {8192: {*range(1, 128)}, 7168: {*range(96, 225)} - {128}}
"""Minimum inputs -> row counts with which a matmul is faster if its bias is zeros. 128 rows are one tile."""


def _library_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """Return torch's matmul for weight [O, I] and bias [O], with a bias of zeros if that is faster.

    With a bias torch calls a library that splits long inputs better. On one of two H200s this saves 1 to 6 of about
    100 us per layer of an 8B model, with 96 to 224 rows.
    """
    zero_bias_rows = next((rows for inputs, rows in ZERO_BIAS_ROWS.items() if weight.shape[1] >= inputs), set[int]())
    if bias is not None or not zero_bias_rows or weight.dtype == torch.float32:
        return _torch_matmul(weight, bias)
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return lambda x: functional.linear(x, weight, zeros if x.shape[0] in zero_bias_rows else None)
