"""The inputs of a decode graph and its attention kernel match torch, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.compute.interpreted import run_interpreted

PROGRAM = """
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from aioengine.attention._base import AttentionShape, CascadeLimits, kv_pool_shape
from aioengine.attention._gpu_rows import FixedDecodeRows, attention_layers
from aioengine.attention._gpu_splits import max_splits, plan_splits
from aioengine.attention.torch import TorchAttention
from aioengine.kernels.triton import decode
from aioengine.models._base import InputSpec
from aioengine.protocol.messages import Sampling
from aioengine.runner.graphs.decode_inputs import DecodeInputs
from aioengine.runner.graphs.shared_prefixes import SharedPrefixes
from aioengine.runner.graphs.token_rows import TokenRows, can_expand, expand_rows
from aioengine.runner.inputs import InputBuilder
from aioengine.runner.page_tables import PageTables
from aioengine.runner.rows import RowTable
from aioengine.scheduler.plan import TOKENS, NewRow, Row
from tests.compute.runner.graphs.test_cascade_groups import part_of
from tests.compute.stepping import write_and_attend

copied = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
torch.cuda.Event = lambda: copied

PAGE_SIZE, NUM_PAGES, HEADS, KV_HEADS, HEAD_SIZE, SIZE = 16, 200, 4, 2, 64, 12
torch.manual_seed(0)
shape = AttentionShape(
    num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5
)
pool = torch.randn(kv_pool_shape(shape, num_pages=NUM_PAGES + 1, page_size=PAGE_SIZE))
table = RowTable(
    page_tables=PageTables(max_rows=64, max_row_pages=60),
    num_embeddings=9, device=torch.device("cpu"), processors=(), max_rows=64
)
model = SimpleNamespace(input_spec=InputSpec(), features=None, vocab_size=9)
inputs = InputBuilder(table, page_size=PAGE_SIZE, num_embeddings=9)
memory = DecodeInputs(inputs, max_rows=SIZE, short_length=0, lag=0, waits=True)
order = np.random.default_rng(0).permutation(NUM_PAGES).tolist()
long, short = [order.pop() for _ in range(17)], [order.pop() for _ in range(3)]
beginnings = [short, long, [], long, short, long, [], long]
lengths = [49, 17 * 16 + 1, 1, 17 * 16 + 200, 64, 17 * 16 + 16, 700, 17 * 16 + 17]
for uid, (begin, length) in enumerate(zip(beginnings, lengths)):
    own = [order.pop() for _ in range(-(-length // PAGE_SIZE) - len(begin))]
    table.open(NewRow(uid, Sampling(uid), length, [1] * length, [*begin, *own]))
rows = inputs.columns_of([Row(uid, length - 1, 1, TOKENS) for uid, length in enumerate(lengths)])
num_rows = len(lengths)
sampled = table.sampled(rows.requests, rows.row_indices, rows.starts + rows.counts)
_, batch = inputs.build(model, rows, None, num_outputs=num_rows)
heads = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_SIZE)
q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
reference = TorchAttention(shape, pool)
reference.prepare(batch)
expected = write_and_attend(reference, q, k, v, 0)
groups = SharedPrefixes(table, CascadeLimits(min_rows=2, min_saved=1, max_groups=4), page_size=PAGE_SIZE).find(rows)
assert groups.pages.num_pages.tolist() == [17, 3]

for cascade in (None, groups):
    ordered = cascade.order if cascade else np.arange(num_rows)
    host = np.full(4000, 77, dtype=np.int32)  # leftovers of a larger step
    memory._host_arrays = [host]
    indices = rows.row_indices[ordered]
    tokens = TokenRows(ordered, indices, rows.starts[ordered], indices, indices, cascade)
    memory.fill(SIZE, rows, sampled, tokens, 1)
    assert (host[memory._ends[0]:] == 77).all()
    memory._device = [torch.from_numpy(host)]
    columns, buffers = memory.columns(SIZE), memory.buffers(SIZE)
    assert columns[0, :num_rows].tolist() == rows.row_indices[ordered].tolist()
    assert columns[1, :num_rows].tolist() == rows.starts[ordered].tolist()
    assert columns[2].tolist() == [*batch.slot_mapping[torch.from_numpy(ordered)].tolist(), *[0] * (SIZE - num_rows)]
    padding = [-1] * (SIZE - num_rows)
    assert columns[4].tolist() == [*rows.row_indices[ordered].tolist(), *padding]
    assert columns[5, :num_rows].tolist() == ordered.tolist(), "the seed of a request is its uid"
    starts = buffers.starts.numpy()
    own_lengths = (np.diff(starts) - 1) * PAGE_SIZE + buffers.last_lengths.numpy()
    assert own_lengths[num_rows:].tolist() == [1] * (SIZE - num_rows)
    splits = torch.from_numpy(plan_splits(own_lengths, max_splits(SIZE, KV_HEADS)))
    step = decode.DecodeRows(
        buffers.starts, buffers.page_ids, splits, torch.zeros(SIZE * KV_HEADS, dtype=torch.int32)
    )
    queries = torch.zeros(SIZE, HEADS, HEAD_SIZE)
    queries[:num_rows] = q[torch.from_numpy(ordered)]
    other = None
    if cascade:
        other = torch.zeros(SIZE, HEADS, HEAD_SIZE), torch.full((SIZE, HEADS), -torch.inf)
        first_page = first_row = 0
        for end, count in zip(cascade.pages.row_ends.tolist(), cascade.pages.num_pages.tolist()):
            pages = torch.from_numpy(cascade.pages.page_ids[first_page : first_page + count])
            keys, values = (split[pages].transpose(1, 2).reshape(-1, KV_HEADS, HEAD_SIZE) for split in pool[0])
            for row in range(first_row, end):
                other[0][row], weights = part_of(queries[row], keys, values, shape.scale)
                other[1][row] = weights[:, 0]
            first_page, first_row = first_page + count, end
    out = torch.empty_like(queries)
    for _ in range(2):
        decode.decode(queries, (pool[0, 0], pool[0, 1]), step, scale=shape.scale, out=out, other=other)
        assert not step.num_done.any()
    assert out.isfinite().all()
    attended = out[:num_rows].view(num_rows, -1)
    if cascade:
        attended = attended[cascade.inverse]
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)
    rules = (40, None, False), (None, 0.6, False), (300, 2.0, True), (None, None, True)
    for window, soft_cap, has_sinks in rules[3:] if cascade else rules:
        special = replace(
            shape, windows=(window,), soft_cap=soft_cap, sinks=(torch.randn(HEADS) * 3,) if has_sinks else ()
        )
        other_reference = TorchAttention(special, pool)
        other_reference.prepare(batch)
        windowed = torch.from_numpy(plan_splits(own_lengths, max_splits(SIZE, KV_HEADS), window))
        rules = attention_layers(special, pool).rules[0]
        kept = step._replace(splits=windowed)
        decode.decode(queries, (pool[0, 0], pool[0, 1]), kept, scale=shape.scale, out=out, other=other, rules=rules)
        wanted = write_and_attend(other_reference, q, k, v, 0)
        wanted = wanted[torch.from_numpy(ordered)]
        torch.testing.assert_close(out[:num_rows].view(num_rows, -1), wanted, rtol=1e-4, atol=1e-5)

# rows of several tokens after their prompts: each token is a row of the graph
steps = [(0, 46, [3, 4, 5]), (1, 272, []), (4, 62, [6, 7]), (7, 288, [])]
for uid, start, known in steps:
    table.requests[uid].num_prompt = start
    table.last_tokens[table.requests[uid].row_index] = 8
rows = inputs.columns_of([Row(uid, start, len(known) or 1, TOKENS, known) for uid, start, known in steps])
sampled = table.sampled(rows.requests, rows.row_indices, rows.starts + rows.counts)
assert can_expand(rows)
expanded = expand_rows(rows, table)
step_inputs, batch = inputs.build(model, rows, None, num_outputs=len(steps))
host = np.full(4000, 77, dtype=np.int32)
expanded.targets[rows.token_ends - 1] = rows.row_indices
memory._host_arrays = [host]
memory.fill(SIZE, rows, sampled, expanded, 1)
memory._device = [torch.from_numpy(host)]
columns, buffers = memory.columns(SIZE), memory.buffers(SIZE)
num_tokens = 7
assert table.last_tokens[columns[0, :num_tokens]].tolist() == step_inputs.token_ids.tolist() == [3, 4, 5, 8, 6, 7, 8]
assert columns[1, :num_tokens].tolist() == step_inputs.positions.tolist()
assert columns[2].tolist() == [*batch.slot_mapping.tolist(), *[0] * (SIZE - num_tokens)]
none = -1
first, second, third, last = rows.row_indices.tolist()
assert columns[4].tolist() == [none, none, first, second, none, third, last, *[none] * (SIZE - num_tokens)]
ends = rows.token_ends - 1
assert columns[7, ends].tolist() == (step_inputs.positions[ends] + 1).tolist(), "the position of a sampled token"
own_lengths = (np.diff(buffers.starts.numpy()) - 1) * PAGE_SIZE + buffers.last_lengths.numpy()
assert own_lengths[:num_tokens].tolist() == (step_inputs.positions + 1).tolist()
assert own_lengths[num_tokens:].tolist() == [1] * (SIZE - num_tokens)
heads = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_SIZE)
q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
reference.prepare(batch)
expected = write_and_attend(reference, q, k, v, 0)
splits = torch.from_numpy(plan_splits(own_lengths, max_splits(SIZE, KV_HEADS)))
step = decode.DecodeRows(buffers.starts, buffers.page_ids, splits, torch.zeros(SIZE * KV_HEADS, dtype=torch.int32))
queries, out = torch.zeros(2, SIZE, HEADS, HEAD_SIZE)
queries[:num_tokens] = q
decode.decode(queries, (pool[0, 0], pool[0, 1]), step, scale=shape.scale, out=out, other=None)
torch.testing.assert_close(out[:num_tokens].view(num_tokens, -1), expected, rtol=1e-4, atol=1e-5)

# tokens of a row share its page table; some end on an earlier page, and some do not see the last split
steps = [(0, 46, 3), (6, 639, 4), (1, 255, 2), (7, 300, 1), (3, 290, 2)]
rows = inputs.columns_of([Row(uid, start, count, TOKENS, [1] * count) for uid, start, count in steps])
sampled = table.sampled(rows.requests, rows.row_indices, rows.starts + rows.counts)
expanded = expand_rows(rows, table)
_, batch = inputs.build(model, rows, None, num_outputs=len(steps))
reference.prepare(batch)
heads = torch.randn(SIZE, HEADS + 2 * KV_HEADS, HEAD_SIZE)
q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
expected = write_and_attend(reference, q, k, v, 0)
for most in (2, 3, 4):
    host = np.full(4000, 77, dtype=np.int32)
    memory._host_arrays = [host]
    plan = memory.fill(SIZE, rows, sampled, expanded, most)
    memory._device = [torch.from_numpy(host)]
    columns, buffers = memory.columns(SIZE), memory.buffers(SIZE)
    assert columns[2].tolist() == batch.slot_mapping.tolist()
    fixed = object.__new__(FixedDecodeRows)
    fixed._layers, fixed.max_row_tokens = attention_layers(shape, pool), most
    splits = torch.zeros(7, max_splits(SIZE, KV_HEADS), dtype=torch.int32)
    fixed._pinned_splits, fixed._copied, fixed._number = [splits.clone()], [copied], 0
    num_done = torch.zeros(SIZE * KV_HEADS, dtype=torch.int32)
    fixed._rows = decode.DecodeRows(buffers.starts, buffers.page_ids, splits, num_done, buffers.last_lengths, most)
    fixed.plan(*plan)
    out = torch.zeros(SIZE, HEADS, HEAD_SIZE)
    decode.decode(q, (pool[0, 0], pool[0, 1]), fixed._rows, scale=shape.scale, out=out)
    assert not num_done.any()
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-4, atol=1e-5)

rows = inputs.columns_of([Row(0, 46, 3, TOKENS, [3, 4, 5])])
rows.requests[0].num_prompt = 47
assert not can_expand(rows), "a prompt"
"""


@pytest.mark.slow
def test_decode_graph_inputs_and_attention_match_torch() -> None:
    """With and without shared pages, with rows of many splits, padding rows, and rows of several tokens."""
    run_interpreted(PROGRAM)
