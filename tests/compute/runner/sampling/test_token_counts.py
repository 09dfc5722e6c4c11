"""Penalties on a GPU equal penalties on a CPU. Triton's interpreter runs the kernel."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
import numpy as np
import torch

from aioengine.protocol.messages import Sampling
from aioengine.runner import logits as logits_processors
from aioengine.runner.logits.token_processors import Penalties
from aioengine.runner.page_tables import PageTables
from aioengine.runner.request_row import LogitsRow
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.device_sampler import TokenCounts
from aioengine.scheduler.plan import NewRow

WIDTH = 3000
processors = logits_processors.in_order()
cpu = torch.device("cpu")
page_tables = PageTables(max_rows=64, max_row_pages=4)
table = RowTable(page_tables=page_tables, num_embeddings=WIDTH, device=cpu, processors=processors, max_rows=64)
generator = np.random.default_rng(0)
samplings = [
    Sampling(0, frequency_penalty=0.5, presence_penalty=0.25),
    Sampling(0, repetition_penalty=1.3),
    Sampling(0, presence_penalty=-1.0, repetition_penalty=0.7),
]
tokens = {}
for uid in range(24):
    tokens[uid] = generator.integers(0, 40, 3 + uid).tolist()
    table.open(NewRow(uid, samplings[uid % 3], 2 + uid // 2, tokens[uid]))
    table.requests[uid].token_ids = list(tokens[uid])  # as on a GPU
counts = TokenCounts(table)
for step in range(4):
    if step == 2:  # another request in the row of a closed one
        table.close(5)
        tokens[30] = [7, 7, 7, 8]
        table.open(NewRow(30, samplings[0], 1, tokens[30]))
        table.requests[30].token_ids = list(tokens[30])
        del tokens[5]
    requests = [table.requests[uid] for uid in tokens]
    row_indices = np.array([request.row_index for request in requests])
    logits = torch.from_numpy(generator.normal(size=(len(requests), WIDTH)).astype(np.float32)) * 3
    expected = logits.clone()
    rows = [LogitsRow(i, request, len(ids)) for i, (request, ids) in enumerate(zip(requests, tokens.values()))][step:]
    for row in rows:  # rows of the step may be left out
        row.request.history = torch.tensor(tokens[row.request.uid])
    Penalties().apply(expected, rows, torch.from_numpy)
    first = 1 if step else 0
    counts.apply(logits[first:], [row._replace(index=row.index - first) for row in rows], torch.from_numpy)
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6), step
    new = torch.from_numpy(generator.integers(0, 40, len(requests)))
    for row in rows:
        tokens[row.request.uid].append(int(new[row.index]))
    table.last_tokens[torch.from_numpy(row_indices)] = new
"""


@pytest.mark.slow
def test_counts_on_the_device_give_the_same_logits() -> None:
    run_interpreted(PROGRAM)
