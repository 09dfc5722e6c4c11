"""Equal bits for any number of rows: which row counts of a matmul agree, and how rows are padded or split to them.

x [T, I], weight [O, I], bias [O] -> [T, O].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Matmul = Callable[[Tensor], Tensor]
"""A function [T, I] -> [T, O] that holds its weight."""

MAX_PLAIN_ROWS = 64
"""Maximum rows of a matmul with a weight that is not packed. More rows are computed in pieces."""
COMMON_ROWS = 8
"""With oneDNN and FBGEMM, only row counts that give the same bits as this one are used."""
MAX_TRIED_ELEMENTS = 2 << 20
"""Maximum size of a result of more than ``MAX_PLAIN_ROWS`` rows in the trials, to limit time and memory."""

DIFFERENT_OUTPUTS = 64
"""Different outputs in the weight of a trial; further outputs are copies."""
TRIED_TERMS = 1 << 13
"""Minimum number of terms in all sums of a trial."""
TRIED_POWERS = 4
"""The elements of a trial are scaled by up to plus or minus this power of two. In fp16, results stay finite."""
ROUNDING = 2.0**-14
"""About the rounding error of sums of such numbers in fp32."""


class Trial:
    """Inputs whose results reveal the summation order of a matmul with weight [O, I] and bias [O].

    The terms of each sum cancel in random pairs. The result is the accumulated rounding error, plus the bias and the
    term without a pair, which are about as large. The terms have very different magnitudes, so that sums of few terms
    are rounded too. If sums are short or few, there are more rows.

    Attributes:
        weight: [O, I]. bias: [O]. x: [R, I].
    """

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        num_pairs = in_features // 2
        order = torch.randperm(in_features, generator=generator)
        firsts, partners, unpaired = order.split([num_pairs, num_pairs, in_features % 2])

        def random(num_rows: int, size: int) -> Tensor:
            """Return [num_rows, size] numbers of very different magnitudes."""
            powers = torch.randint(-TRIED_POWERS, TRIED_POWERS + 1, (num_rows, size), generator=generator)
            return torch.randn(num_rows, size, generator=generator) * 2.0**powers

        num_different = min(out_features, DIFFERENT_OUTPUTS)
        num_rows = min(1 + TRIED_TERMS // (num_different * in_features), MAX_PLAIN_ROWS)
        weight, x = random(num_different, in_features), random(num_rows, in_features)
        weight[:, partners] = -weight[:, firsts]
        x[:, partners] = x[:, firsts]
        weight[:, unpaired] *= ROUNDING
        times = -(-out_features // num_different)
        self.weight = weight.to(dtype).repeat(times, 1)[:out_features].contiguous()
        self.bias = (random(num_different, 1) * ROUNDING).to(dtype).repeat(times, 1)[:out_features, 0].contiguous()
        self.x = x.to(dtype)

    def agreement_test(self, matmul: Matmul, common: int, *others: Matmul) -> Callable[[int], bool]:
        """Return a test of row counts: do all rows get the same bits as when they are computed ``common`` at a time?

        others: matmuls that must give the same bits as ``matmul``.
        """
        num_rows = self.x.shape[0]
        expected = self._results(matmul, common, torch.arange(-(-num_rows // common) * common) % num_rows)[:num_rows]

        def agrees(count: int) -> bool:
            """Return whether rows keep their bits with this row count. Each row is computed at another position."""
            chosen = (torch.arange(-(-num_rows // count) * count) + (count + 1) // 2) % num_rows
            wanted = expected[chosen] if num_rows > 1 else expected.expand(len(chosen), -1)
            return all(torch.equal(self._results(tried, count, chosen), wanted) for tried in (matmul, *others))

        return agrees

    def _results(self, matmul: Matmul, count: int, chosen: Tensor) -> Tensor:
        """Return the results [N, O] of the chosen rows [N], computed ``count`` at a time."""
        results = [matmul(self.x[rows]) for rows in chosen.split(count)]
        return torch.cat(results) if len(results) > 1 else results[0]


UNSPLIT_ROWS = 32
"""Up to this row count, rows are padded rather than split."""


def in_pieces(matmul: Matmul, counts: tuple[int, ...]) -> Matmul:
    """Wrap ``matmul`` so that it only sees the row counts in ``counts`` (ascending): pads or splits the rows."""
    max_count, sizes = counts[-1], _first_pieces(counts)

    def matmul_in_pieces(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        num_rows = x.shape[0]
        if num_rows <= max_count and (size := sizes[num_rows]) >= num_rows:
            return _padded(matmul, x, size)
        pieces: list[Tensor] = []
        while num_rows := x.shape[0]:
            size = sizes[min(num_rows, max_count)]
            pieces.append(_padded(matmul, x[:size], size))
            x = x[size:]
        return _joined(pieces)

    return matmul_in_pieces


@lru_cache(maxsize=256)
def _first_pieces(counts: tuple[int, ...]) -> list[int]:
    """Return the size of the first piece of each row count up to the largest of ``counts``."""
    return [_first_piece(num_rows, counts) for num_rows in range(counts[-1] + 1)]


def _first_piece(num_rows: int, counts: tuple[int, ...]) -> int:
    """Return the next larger of ``counts``, or the next smaller one if a third of the rows would be padding."""
    larger = next(count for count in counts if count >= num_rows)
    smaller = max((count for count in counts if count <= num_rows), default=larger)
    return smaller if smaller >= UNSPLIT_ROWS and 2 * larger >= 3 * num_rows else larger


def _padded(matmul: Matmul, x: Tensor, padded_rows: int) -> Tensor:
    """Compute ``matmul`` of x [T, I], padded to ``padded_rows`` with copies of its first rows -> [T, O]."""
    num_rows = x.shape[0]
    if padded_rows == num_rows:
        return matmul(x)
    copies, rest = divmod(padded_rows, num_rows)
    parts = [x] * copies
    return matmul(_joined([*parts, x[:rest]] if rest else parts))[:num_rows]


def _joined(parts: list[Tensor]) -> Tensor:
    """Join the rows of parts [..., N], and keep their memory layout."""
    return torch.cat(parts) if parts[0].is_contiguous() else torch.cat([part.t() for part in parts], 1).t()
