"""The inputs of a decode graph of a model with page groups."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
from types import SimpleNamespace

import numpy as np
import torch

from aioengine.models._base import InputSpec
from aioengine.settings.page_groups import PageGroups
from aioengine.protocol.messages import Sampling
from aioengine.runner.graphs.decode_inputs import DecodeInputs
from aioengine.runner.graphs.token_rows import TokenRows
from aioengine.runner.inputs import InputBuilder
from aioengine.runner.page_tables import PageTables
from aioengine.runner.rows import RowTable
from aioengine.scheduler.plan import TOKENS, NewRow, Row

copied = SimpleNamespace(synchronize=lambda: None)
torch.cuda.Event = lambda: copied
PAGE_SIZE, NUM_PAGES, SIZE, WINDOWS = 4, 400, 8, (None, 10, 5)
groups = PageGroups(windows=WINDOWS, page_size=PAGE_SIZE)
table = RowTable(
    page_tables=PageTables(max_rows=8, max_row_pages=30, groups=groups),
    num_embeddings=9, device=torch.device("cpu"), processors=(), max_rows=8
)
inputs = InputBuilder(table, page_size=PAGE_SIZE, num_embeddings=9)
model = SimpleNamespace(input_spec=InputSpec(), features=None, vocab_size=9)
memory = DecodeInputs(inputs, max_rows=SIZE, short_length=0, lag=0, waits=True)
order = np.random.default_rng(0).permutation(NUM_PAGES).tolist()
lengths = [1, 4, 5, 37, 60]
for uid, length in enumerate(lengths):
    pages = [order.pop() for _ in range(-(-length // PAGE_SIZE) * 3)]
    if length == 37:
        pages[1:3] = [-1, -1]  # freed before the row was opened
    table.open(NewRow(uid, Sampling(uid), length, [1] * length, pages))
rows = inputs.columns_of([Row(uid, length - 1, 1, TOKENS) for uid, length in enumerate(lengths)])
sampled = table.sampled(rows.requests, rows.row_indices, rows.starts + rows.counts)
_, batch = inputs.build(model, rows, None, num_outputs=len(lengths))
hosts = np.full((3, 4000), 77, dtype=np.int32)
memory._host_arrays = [*hosts]
tokens = TokenRows(slice(None), rows.row_indices, rows.starts, rows.row_indices, rows.row_indices)
memory.fill(SIZE, rows, sampled, tokens, 1)
memory._device = [*torch.from_numpy(hosts)]
parts = memory.buffers(SIZE).parts
assert len(parts) == len(batch.parts) == 3
for part, own_batch, window in zip(parts, batch.parts, WINDOWS, strict=True):
    assert part.slot_mapping[: len(lengths)].tolist() == own_batch.slot_mapping.tolist()
    assert not part.slot_mapping[len(lengths) :].any()
    for i, length in enumerate(lengths):
        start, end = part.starts[i : i + 2].tolist()
        page_ids = part.page_ids[start:end].tolist()
        assert page_ids == own_batch.page_table[i, : end - start].tolist()
        first_seen = 0 if window is None else max(0, length - window)
        assert [page > 0 for page in page_ids] == [index >= first_seen // PAGE_SIZE for index in range(end - start)]
    padded = part.page_ids[part.starts[len(lengths)] : part.starts[SIZE]].tolist()
    assert padded == [0] * (SIZE - len(lengths))

# a capture has only padding rows
padding = memory.columns(SIZE)[:, len(lengths) :].clone()
starts, last_lengths = memory.fill_padding(SIZE)
assert (memory.columns(SIZE) == padding[:, :1]).all()
for part in memory.buffers(SIZE).parts:
    assert part.starts.tolist() == starts.tolist() == [*range(SIZE + 1)]
    assert part.last_lengths.tolist() == last_lengths.tolist() == [1] * SIZE
    assert not part.slot_mapping.any()
    assert not part.page_ids.any()
"""


@pytest.mark.slow
def test_each_group_reads_its_own_pages_within_its_window() -> None:
    run_interpreted(PROGRAM)
