"""The kernels that accept drafts and move rows match torch, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import torch

from aioengine.kernels.triton import drafts
from aioengine.kernels.triton.decode import DecodeRows, decode
from tests.compute import simulated_graphs as simulated

torch.manual_seed(0)
num_rows, num_drafts, page_size = 40, 3, 4
firsts = torch.arange(num_rows) * (num_drafts + 1)
spans = torch.stack([
    torch.arange(num_rows), firsts, torch.randint(num_drafts + 1, (num_rows,)), torch.full((num_rows,), 3),
    torch.arange(num_rows) + 200,
])
sources = torch.randperm(200)[: num_rows * (num_drafts + 1)].int() + 250
token_ids = torch.randint(-1, 2, (len(sources),))  # FAILED, too
results = []
for accept in (drafts.accept, simulated.accept):
    last_tokens, rejected = torch.arange(450) % 2, torch.zeros(num_rows + 1, dtype=torch.int32)
    accept(spans, token_ids, sources, last_tokens, rejected)
    results.append((last_tokens, rejected))
for actual, expected in zip(*results):
    assert torch.equal(actual, expected)
assert len(rejected.unique()) == 4

lengths = torch.randint(5, 60, (12,)).int()
starts = torch.cat([torch.zeros(1), -(-lengths // page_size)]).cumsum(0).int()
page_ids = torch.randperm(int(starts[-1])).int()
columns = torch.zeros(12, 12, dtype=torch.int32)
columns[-2] = torch.arange(12)
last_lengths = lengths - (starts.diff() - 1) * page_size
columns[1], columns[3], columns[7], columns[-1] = lengths - 1, last_lengths, lengths + 1, torch.arange(12) + 29
columns[2] = page_ids[(starts[1:] - 1).long()] * page_size + last_lengths - 1
moved, expected = columns.clone(), columns.clone()
options = {"sampled": 7, "page_size": page_size, "lag": 1}
drafts.move_rows(moved, (starts, page_ids), rejected, **options)
simulated.move_rows(expected, (starts, page_ids), rejected, **options)
assert torch.equal(moved, expected)
assert (moved[3] <= 0).any(), "a row ends on an earlier page"
assert torch.equal(moved[1], columns[1] - rejected[29:])
columns[-2] = -1
moved, expected = columns.clone(), columns.clone()
drafts.move_rows(moved, (starts, page_ids), rejected, **options)
simulated.move_rows(expected, (starts, page_ids), rejected, **options)
assert torch.equal(moved, expected)
assert torch.equal(moved[4] < 0, rejected[29:] > 0), "only rows after all accepted drafts are sampled"
"""


@pytest.mark.slow
def test_kernels_match_torch() -> None:
    run_interpreted(PROGRAM)
