"""Sums over ranks in Triton's interpreter: a rank whose inbox already has the messages of the others."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_compiled, run_interpreted

SETUP = """
from types import SimpleNamespace

import torch

from aioengine.kernels.norms import rms_norm
from aioengine.kernels.triton import rank_sums

SIZE, ROWS, COLUMNS = 3, 4, 96


def inboxes(rank):
    \"\"\"Return the inboxes of a rank, in the memory of this process.\"\"\"
    made = object.__new__(rank_sums.Inboxes)
    made._rank, made._size, made._max_rows, made._num_columns = rank, SIZE, ROWS, COLUMNS
    made.lines = [torch.full((2, SIZE - 1, ROWS, COLUMNS // 2), -1, dtype=torch.int32) for _ in range(SIZE)]
    made._turns = torch.zeros(ROWS, dtype=torch.int32)
    made.memory = SimpleNamespace(addresses=torch.tensor([inbox.data_ptr() for inbox in made.lines]))
    return made
"""

SUMS = """
torch.manual_seed(0)


def check(dtype, tolerance):
    made = inboxes(1)
    for number in range(1, 6):
        num_rows = 1 + number % ROWS
        parts = torch.randn(SIZE, num_rows, COLUMNS).to(dtype)
        words = parts.view(torch.int32)
        words[:, 0, 0] = -1  # two NaN
        turns = made._turns[:num_rows].tolist()
        for row, turn in enumerate(turns):
            for index, peer in enumerate((0, 2)):
                made.lines[1][turn, index, row] = torch.where(words[peer, row] == -1, 0x7FFF7FFF, words[peer, row])
        expected = sum(part.float() for part in parts).to(dtype)
        if number % 2:
            actual = made.all_reduce(parts[1])
            torch.testing.assert_close(actual, expected, atol=0, rtol=tolerance, equal_nan=True)
        else:
            residual, epsilon = torch.randn(num_rows, COLUMNS).to(dtype), torch.tensor(1e-5)
            weight = torch.randn(COLUMNS).to(dtype if number % 4 else torch.float32)
            total = residual + expected
            normed = made.add_rms_norm(parts[1], residual, weight, epsilon)
            torch.testing.assert_close(residual, total, atol=tolerance, rtol=tolerance, equal_nan=True)
            wanted = rms_norm(total, weight, epsilon)
            torch.testing.assert_close(normed, wanted, atol=2 * tolerance, rtol=0.02, equal_nan=True)
        sent = torch.where(words[1] == -1, 0x7FFF7FFF, words[1])
        for row, turn in enumerate(turns):
            for peer, index in ((0, 0), (2, 1)):
                assert torch.equal(made.lines[peer][turn, index, row], sent[row])
                made.lines[peer][turn, index, row] = -1
        assert made._turns[:num_rows].tolist() == [1 - turn for turn in turns]
        assert all((inbox == -1).all() for inbox in made.lines), "each rank empties what it has read, and nothing else"


check(torch.float16, 0)
check(torch.bfloat16, 0.02)  # the interpreter cuts fp32 to bf16 instead of rounding it
"""

COMPILED = """
for dtype in (torch.bfloat16, torch.float16):
    made = inboxes(0)
    parts = torch.zeros(2, COLUMNS, dtype=dtype)
    made.all_reduce(parts)
    for weight in (parts[0], parts[0].float()):
        made.add_rms_norm(parts, parts, weight, torch.tensor(1e-5))
"""


def test_sums_are_those_of_all_ranks() -> None:
    """They are rounded once, and the other ranks receive the part of this rank."""
    run_interpreted(SETUP + SUMS)


@pytest.mark.slow
def test_sums_compile_for_hopper() -> None:
    run_compiled(SETUP + COMPILED)
