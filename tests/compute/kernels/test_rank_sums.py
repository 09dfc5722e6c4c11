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


def inboxes(rank, has_flags):
    \"\"\"Return the inboxes of a rank, in the memory of this process.\"\"\"
    made = object.__new__(rank_sums.Inboxes)
    made._ranks, made._num_columns, made._has_flags, made._is_sent = (rank, SIZE, ROWS), COLUMNS, has_flags, False
    dtype = torch.int32 if has_flags else torch.int64
    num_senders = SIZE - has_flags  # with flags, without the owner
    num_lines = 2 * num_senders * ROWS
    made._lines_bytes = num_lines * COLUMNS // 2 * dtype.itemsize
    own = [torch.zeros(made._lines_bytes + 4 * num_lines, dtype=torch.uint8) for _ in range(SIZE)]
    made.lines = [inbox[: made._lines_bytes].view(dtype).view(2, num_senders, ROWS, COLUMNS // 2) for inbox in own]
    made.flags = [inbox[made._lines_bytes :].view(torch.int32).view(2, num_senders, ROWS) for inbox in own]
    made._counts = torch.zeros(ROWS, dtype=torch.int32)
    made.memory = SimpleNamespace(addresses=torch.tensor([inbox.data_ptr() for inbox in own]))
    return made
"""

SUMS = """
torch.manual_seed(0)


def check(has_flags, dtype, tolerance, first=0):
    made = inboxes(1, has_flags)
    made._counts += first
    for number in range(1, 6):
        num_rows = 1 + number % ROWS
        parts = torch.randn(SIZE, num_rows, COLUMNS).to(dtype)
        words = parts.view(torch.int32)
        counts = made._counts[:num_rows] + 1

        def message(rank, row):
            number = int(counts[row]) << 32  # negative after the largest count
            return words[rank, row] if has_flags else (words[rank, row].long() & 0xFFFFFFFF) | number

        for row, count in enumerate(counts.tolist()):
            for index, peer in enumerate((0, 2) if has_flags else (0, 1, 2)):
                if peer == 1:
                    continue
                made.lines[1][count % 2, index, row] = message(peer, row)
                made.flags[1][count % 2, index, row] = count
        expected = sum(part.float() for part in parts).to(dtype)
        if number % 2:
            torch.testing.assert_close(made.all_reduce(parts[1]), expected, atol=0, rtol=tolerance)
        else:
            residual, epsilon = torch.randn(num_rows, COLUMNS).to(dtype), torch.tensor(1e-5)
            weight = torch.randn(COLUMNS).to(dtype if number % 4 else torch.float32)
            total = residual + expected
            normed = made.add_rms_norm(parts[1], residual, weight, epsilon)
            torch.testing.assert_close(residual, total, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(normed, rms_norm(total, weight, epsilon), atol=2 * tolerance, rtol=0.02)
        for row, count in enumerate(counts.tolist()):  # what the other ranks received
            for peer, index in ((0, 0), (2, 1)) if has_flags else ((0, 1), (1, 1), (2, 1)):
                assert torch.equal(made.lines[peer][count % 2, index, row], message(1, row))
                assert made.flags[peer][count % 2, index, row] == count * has_flags
        assert torch.equal(made._counts[:num_rows], counts)


for has_flags in (False, True):
    check(has_flags, torch.float16, 0)
    check(has_flags, torch.float16, 0, first=2**31 - 3)  # the largest count is followed by the smallest
    check(has_flags, torch.bfloat16, 0.02)  # the interpreter cuts fp32 to bf16 instead of rounding it
"""

SENT = """
from aioengine.kernels.triton import skinny_linear

torch.manual_seed(0)
COLUMNS = 158  # the last tile has fewer
ranks = [inboxes(rank, False) for rank in range(SIZE)]
for rank in ranks:
    rank.memory = ranks[0].memory
weights = [torch.randn(COLUMNS, 512).half() for _ in ranks]
num_done = torch.zeros(3, dtype=torch.int32)
for num_rows in (1, 3, 1, 4):
    parts = []
    for rank, weight in zip(ranks, weights):
        x = torch.randn(num_rows, 512).half()
        parts.append(torch.nn.functional.linear(x, weight))
        if num_rows == 1:
            skinny_linear.vector_matmul(x, weight, None, sender=rank.sender())
        else:
            programs = 64, 64, 2, 2, 4, 0
            skinny_linear.matmul(x, weight, None, programs=programs, num_done=num_done, sender=rank.sender())
    sums = [rank.all_reduce(torch.full_like(parts[0], torch.nan)) for rank in ranks]  # it does not read the parts
    torch.testing.assert_close(sums[0], sum(part.float() for part in parts).half(), atol=0.1, rtol=0.01)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
"""

COMPILED = """
for dtype, has_flags in ((torch.bfloat16, False), (torch.float16, True)):
    made = inboxes(0, has_flags)
    parts = torch.zeros(2, COLUMNS, dtype=dtype)
    made.all_reduce(parts)
    for weight in (parts[0], parts[0].float()):
        made.add_rms_norm(parts, parts, weight, torch.tensor(1e-5))
made = inboxes(0, False)
made.sender()
made.all_reduce(parts)
"""


def test_sums_are_those_of_all_ranks() -> None:
    """They are rounded once, and the other ranks receive the part of this rank with the number of the message."""
    run_interpreted(SETUP + SUMS)


def test_products_send_their_parts() -> None:
    """The sum needs only the messages."""
    run_interpreted(SETUP + SENT)


@pytest.mark.slow
def test_sums_compile_for_hopper() -> None:
    run_compiled(SETUP + COMPILED)
