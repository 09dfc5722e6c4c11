"""Matmul with weights that never change: x [T, I], weight [O, I], bias [O] -> [T, O].

On a CPU a row of the result is the same bits for every T. The order in which a library adds up a row can depend on T
(one row often has another kernel than many, and matrix units split the columns into other blocks), so it is tested at
the start. A packed weight is multiplied with few row counts only, those of ``ROW_COUNTS`` that gave the same bits: rows
are padded to one of them, or split. Where few row counts agree in bf16 (with several threads, a library may divide a
long sum among them, and add up the parts in another order for other rows), the matmul is done in fp32. In other dtypes
rows are padded, with copies of themselves, to a row count from which on the bits do not change, and split where they
are more than were tried. Where nothing agrees, rows are computed one by one. On a GPU the same holds with
``batch_invariant``.

oneDNN compiles code for every row count and weight shape, at least 0.5 MB in 0.5 to 4 ms, and keeps it: few row counts
also save memory and time. ``processes.host.limit_kernel_cache`` limits the code that is kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BLOCK = 64
"""Rows of a matmul with a weight that is not packed: more are split."""
ROW_COUNTS = (
    *(*range(1, 9), 10, 12, 14, 16, *range(20, 65, 4)),
    *(*range(72, 129, 8), *range(144, 257, 16), *range(288, 513, 32)),
)
"""Row counts of a matmul with a packed weight: rows are padded by 3 % on average."""
TILED_COUNTS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Row counts for matrix units, which multiply 16 rows in the time of one. All are tried with every weight."""
COMMON_ROWS = 8
"""The row counts that give the same bits as this one are used."""
LEAST_COUNT = 16
"""Where fewer rows than these would be multiplied at a time, another dtype is tried."""
FEW_ROWS = 32
"""Up to this row count, rows are padded rather than split."""
MAX_TRIED_NUMBERS = 2 << 20
"""Numbers in the largest result of more than ``BLOCK`` rows that is tried at the start, to limit time and memory."""
FAST_ROWS = 4
"""oneDNN reads packed bf16 weights fastest with 3 to 6 rows: 31 GB/s with one row, 26 with two, 37 with four, on two
cores that can read 38. So fewer rows are padded to four where the weight does not fit the cache.
"""
CACHED_BYTES = 1 << 20
LONG_INPUTS = 8192
FEW_ROWS_OF_LONG_INPUTS = 128
TRIED_ROWS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 17, 32, 33, BLOCK)
DIFFERENT_OUTPUTS = 64
"""Outputs of a weight that is tried; more are copies of these."""
TRIED_TERMS = 1 << 13
"""Terms of all sums of a trial, at least."""
TRIED_POWERS = 4
"""Numbers of a trial are larger or smaller by up to this power of two. In fp16, results stay finite."""
ROUNDING = 2.0**-14
"""About what is rounded off in sums of such numbers in fp32."""


class Matmul(Protocol):
    """[T, I] -> [T, O]; holds its weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        ...


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]."""
    return functional.linear(x, weight, bias)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed weights are used: on a CPU, for the dtypes that it supports there."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor, *, has_bias: bool = False) -> Tensor:
    """The weight [O, I] in oneDNN's layout where ``prepare`` takes that as it is, else the weight itself."""
    if weight.is_mkldnn or not packs(weight.dtype, weight.device):
        return weight
    out_features, in_features = weight.shape
    packing = choose_packing(out_features, in_features, weight.dtype, torch.get_num_threads(), has_bias=has_bias)
    return _pack(weight, packing.for_rows) if packing.dtype == weight.dtype else weight


def unpack(weight: Tensor) -> Tensor:
    """The weight [O, I] before ``pack``: an equal tensor if it was packed, else the weight itself."""
    return weight.to_dense() if weight.is_mkldnn else weight


def prepare(weight: Tensor, bias: Tensor | None, *, batch_invariant: bool = False) -> Matmul:
    """The fastest callable [T, I] -> [T, O] for weight [O, I] and bias [O].

    Args:
        weight: packed already, by ``pack``, or plain; a plain one may be copied and is then not needed any more.
        batch_invariant: on a GPU, a row of the result must not depend on the number of rows.
    """
    if weight.device.type != "cpu":
        return _invariant(weight, bias) if batch_invariant else _on_device(weight, bias)
    out_features, in_features = weight.shape
    num_threads = torch.get_num_threads()
    if not packs(weight.dtype, weight.device):
        return _in_rows(_plain(weight, bias), independent_rows(out_features, in_features, weight.dtype, num_threads))
    packing = choose_packing(out_features, in_features, weight.dtype, num_threads, has_bias=bias is not None)
    if packing.dtype == weight.dtype:
        return _in_pieces(_packed(weight, bias, packing.for_rows), packing.counts)
    wide_bias = None if bias is None else bias.to(packing.dtype)
    wide = _in_pieces(_packed(unpack(weight).to(packing.dtype), wide_bias, packing.for_rows), packing.counts)
    return lambda x: wide(x.to(packing.dtype)).to(x.dtype)


class Packing(NamedTuple):
    """How a weight is packed.

    Attributes:
        for_rows: the row count that oneDNN packs it for; None: any.
        counts: the row counts that then give the same bits, ascending.
        dtype: in which it is multiplied.
    """

    for_rows: int | None
    counts: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=256)
def choose_packing(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int, *, has_bias: bool = False
) -> Packing:
    """The packing in ``dtype`` where enough row counts agree there, else in fp32; row by row where they do not there.

    ``num_threads`` only tells apart what was tried with other numbers of threads.
    """
    for tried in dict.fromkeys((dtype, torch.float32)):
        packing = _try_packings(out_features, in_features, tried, has_bias=has_bias)
        if packing.counts and packing.counts[-1] >= LEAST_COUNT:
            return packing
    return Packing(None, (1,), torch.float32)


def _try_packings(out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool) -> Packing:
    """The usual packing, and with a matrix unit for bf16 that for one row where not all numbers of rows agree with the
    usual one: more of them agree then, but many rows take a third longer.
    """
    is_slow_with_few = dtype == torch.bfloat16 and 2 * out_features * in_features > CACHED_BYTES
    least = FAST_ROWS if is_slow_with_few else 1
    most = max(BLOCK, MAX_TRIED_NUMBERS // out_features)
    counts = [count for count in TILED_COUNTS if least <= count <= most]
    trial = Trial(out_features, in_features, dtype)

    def agrees(for_rows: int | None) -> Callable[[int], bool]:
        return trial.agreeing(_packed(trial.weight, trial.bias if has_bias else None, for_rows), COMMON_ROWS)

    if dtype == torch.bfloat16 and _has_matrix_unit():
        agree = agrees(None)
        if all(agree(count) for count in reversed(counts)):
            return Packing(None, tuple(counts), dtype)
        return Packing(1, tuple(filter(agrees(1), counts)), dtype)
    agreeing = tuple(filter(agrees(None), counts))
    differing = max({*counts} - {*agreeing}, default=0)
    if differing >= COMMON_ROWS:
        return Packing(None, agreeing, dtype)
    return Packing(None, tuple(count for count in ROW_COUNTS if count >= max(least, differing + 1)), dtype)


def _has_matrix_unit() -> bool:
    """Whether this CPU has one for bf16 (AMX)."""
    return torch.cpu._is_amx_tile_supported()


class Trial:
    """Rows whose results show in which order a matmul of a weight [O, I] and a bias [O] adds up.

    The terms of a result cancel in pairs, at random places: what is left is the rounding of the sums on the way, and
    the bias and a term without a pair, which are about as large. The terms are of very different sizes, so that sums of
    few terms are rounded too; and there are more rows where results have few terms, or are few.

    Attributes:
        weight: [O, I]. bias: [O]. x: [R, I].
    """

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        num_pairs = in_features // 2
        order = torch.randperm(in_features, generator=generator)
        added, taken_back, alone = order.split([num_pairs, num_pairs, in_features % 2])

        def random(num_rows: int, size: int) -> Tensor:
            """[num_rows, size] numbers, large and small ones."""
            powers = torch.randint(-TRIED_POWERS, TRIED_POWERS + 1, (num_rows, size), generator=generator)
            return torch.randn(num_rows, size, generator=generator) * 2.0**powers

        num_different = min(out_features, DIFFERENT_OUTPUTS)
        num_rows = min(1 + TRIED_TERMS // (num_different * in_features), BLOCK)
        weight, x = random(num_different, in_features), random(num_rows, in_features)
        weight[:, taken_back] = -weight[:, added]
        x[:, taken_back] = x[:, added]
        weight[:, alone] *= ROUNDING
        times = -(-out_features // num_different)
        self.weight = weight.to(dtype).repeat(times, 1)[:out_features].contiguous()
        self.bias = (random(num_different, 1) * ROUNDING).to(dtype).repeat(times, 1)[:out_features, 0].contiguous()
        self.x = x.to(dtype)

    def agreeing(self, matmul: Matmul, common: int) -> Callable[[int], bool]:
        """Tells of a row count whether with it all rows get the bits that they get ``common`` at a time."""
        num_rows = self.x.shape[0]
        expected = self._results(matmul, common, torch.arange(-(-num_rows // common) * common) % num_rows)[:num_rows]

        def agrees(count: int) -> bool:
            """Each row is computed at another place than before."""
            chosen = (torch.arange(-(-num_rows // count) * count) + (count + 1) // 2) % num_rows
            wanted = expected[chosen] if num_rows > 1 else expected.expand(len(chosen), -1)
            return torch.equal(self._results(matmul, count, chosen), wanted)

        return agrees

    def _results(self, matmul: Matmul, count: int, chosen: Tensor) -> Tensor:
        """[N, O] of the chosen rows [N], ``count`` at a time."""
        results = [matmul(self.x[rows]) for rows in chosen.split(count)]
        return torch.cat(results) if len(results) > 1 else results[0]


@lru_cache(maxsize=256)
def independent_rows(out_features: int, in_features: int, dtype: torch.dtype, num_threads: int) -> range:
    """From how many up to how many rows a row's result is seen not to depend on their number; empty: none.

    ``num_threads`` only tells apart what was tried with other numbers of threads.
    """
    trial = Trial(out_features, in_features, dtype)
    agrees = trial.agreeing(_plain(trial.weight, None), BLOCK)
    first = BLOCK + 1
    for num_rows in reversed(TRIED_ROWS):
        if not agrees(num_rows):
            break
        first = num_rows
    return range(first, BLOCK + 1)


def _plain(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's own for weight [O, I] and bias [O]."""
    return lambda x: functional.linear(x, weight, bias)


def _pack(weight: Tensor, for_rows: int | None) -> Tensor:
    """The weight [O, I] in oneDNN's layout for ``for_rows`` rows; None: for any number."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), for_rows)


def _packed(weight: Tensor, bias: Tensor | None, for_rows: int | None) -> Matmul:
    """oneDNN's for weight [O, I], which may be packed already, and bias [O]."""
    operation = torch.ops.mkldnn._linear_pointwise.default
    packed = weight if weight.is_mkldnn else _pack(weight, for_rows)
    return lambda x: operation(x, packed, bias, "none", [], "")


class DeviceMatmul:
    """For weight [O, I] and bias [O] on a GPU: up to 64 rows go through kernels that read the weight at full speed,
    more through torch's library.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [O, I], contiguous; bias [O]."""
        from aioengine.kernels.triton import skinny_linear, vector_linear

        self.weight = weight
        self.bias = bias
        self._is_narrow = weight.dtype != torch.float32
        num_tiles = skinny_linear.num_tiles(weight.shape[0])
        self._num_done = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
        self._by_library = _by_library(weight, bias)
        self._vector_matmul = vector_linear.matmul
        self._skinny_matmul = skinny_linear.matmul
        self._shape_of_programs = skinny_linear.shape_of_programs
        self._max_rows = skinny_linear.MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        num_rows = x.shape[0]
        if num_rows <= self._max_rows and x.is_contiguous():
            if num_rows == 1:
                return self._vector_matmul(x, self.weight, self.bias)
            programs = self._shape_of_programs(*self.weight.shape, num_rows) if self._is_narrow else None
            if programs is not None:
                return self._skinny_matmul(x, self.weight, self.bias, programs=programs, num_done=self._num_done)
        return self._by_library(x)


def _on_device(weight: Tensor, bias: Tensor | None) -> Matmul:
    """For weight [O, I] and bias [O] on a GPU."""
    if not launcher.serves(weight) or not weight.is_contiguous():
        return lambda x: functional.linear(x, weight, bias)
    return DeviceMatmul(weight, bias)


def _by_library(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's own for weight [O, I] and bias [O], with a bias of zeros where that is faster: torch then calls a library
    that splits long inputs better for few rows, which saves 3 of 230 us in a layer of a model of 8 billion parameters.
    """
    if bias is not None or weight.shape[1] < LONG_INPUTS or weight.dtype == torch.float32:
        return lambda x: functional.linear(x, weight, bias)
    zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return lambda x: functional.linear(x, weight, zeros if x.shape[0] <= FEW_ROWS_OF_LONG_INPUTS else None)


def _invariant(weight: Tensor, bias: Tensor | None) -> Matmul:
    """For weight [O, I] and bias [O] on a GPU, with rows that do not depend on their number."""
    from aioengine.kernels.triton import invariant_linear

    invariant_matmul, whole = invariant_linear.matmul, weight.contiguous()
    return lambda x: invariant_matmul(x.contiguous(), whole, bias)


def _in_pieces(matmul: Matmul, counts: tuple[int, ...]) -> Matmul:
    """``matmul``, of as many rows as one of ``counts`` (from few to many): padded, or split where they are more."""
    most = counts[-1]
    sizes = [_first_piece(num_rows, counts) for num_rows in range(most + 1)]

    def in_pieces(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        num_rows = x.shape[0]
        if num_rows <= most and sizes[num_rows] >= num_rows:
            return _of_rows(matmul, x, sizes[num_rows])
        pieces: list[Tensor] = []
        while num_rows := x.shape[0]:
            size = sizes[min(num_rows, most)]
            pieces.append(_of_rows(matmul, x[:size], size))
            x = x[size:]
        return torch.cat(pieces)

    return in_pieces


def _first_piece(num_rows: int, counts: tuple[int, ...]) -> int:
    """The next larger of ``counts``; or, where a third of its rows would be padding, the next smaller one."""
    larger = next(count for count in counts if count >= num_rows)
    smaller = max((count for count in counts if count <= num_rows), default=larger)
    return smaller if smaller >= FEW_ROWS and 2 * larger >= 3 * num_rows else larger


def _in_rows(matmul: Matmul, counts: range) -> Matmul:
    """``matmul``, of as many rows as one of ``counts``: padded, or split where they are more; one by one if empty."""
    if not counts:
        return _in_pieces(matmul, (1,))
    least, most = counts[0], counts[-1]

    def in_rows(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if x.shape[0] <= most:
            return _of_rows(matmul, x, max(least, x.shape[0]))
        return torch.cat([_of_rows(matmul, piece, max(least, piece.shape[0])) for piece in x.split(most)])

    return in_rows


def _of_rows(matmul: Matmul, x: Tensor, wanted: int) -> Tensor:
    """``matmul`` of x [T, I], padded to ``wanted`` rows with copies of its first rows -> [T, O]."""
    num_rows = x.shape[0]
    if wanted == num_rows:
        return matmul(x)
    copies, rest = divmod(wanted, num_rows)
    return matmul(torch.cat((*(x,) * copies, x[:rest])))[:num_rows]
