"""FlashInfer's and Triton's attention, compared with torch over the same pages."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from aioengine.attention import _mixed, _shared_rows
from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from tests.compute import stepping
from tests.compute.stepping import write_and_attend
from tests.gpu.test_model_runner import on_device

NUM_PAGES, PAGE_SIZE = 600, 16


def make_batch(rows: list[tuple[int, int]]) -> ForwardBatch:
    """Return rows of (earlier positions, new positions) over pages in random order."""
    order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    tables = [[order.pop() for _ in range(-(-(start + count) // PAGE_SIZE))] for start, count in rows]
    width = max(map(len, tables))
    spans = [
        (table, place)
        for (start, count), table in zip(rows, tables, strict=True)
        for place in range(start, start + count)
    ]
    slots = [table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for table, place in spans]
    page_table = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    return ForwardBatch(
        slot_mapping=torch.tensor(slots, device="cuda"),
        page_table=page_table.cuda(),
        query_lengths=[count for _, count in rows],
        kv_lengths=[start + count for start, count in rows],
    )


ROWS = {
    "one decode": [(100, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (900, 1), (333, 1)],
    "one prefill": [(0, 700)],
    "prefills with a prefix": [(160, 33), (0, 5), (480, 129)],
    "mixed": [(40, 1), (800, 1), (0, 300), (64, 1), (32, 77)],
    "mixed, fresh ones last": [(40, 1), (800, 1), (160, 33), (0, 300), (0, 77)],
    "decodes of many splits": [(3, 1), (5000, 1), (0, 1), (2000, 1)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads", "head_size"),
    [
        ("flashinfer", 16, 8, 128),
        ("flashinfer", 32, 8, 128),
        ("triton", 16, 8, 128),
        ("triton", 14, 2, 32),
        ("triton", 71, 1, 64),
    ],
)
def test_attention_matches_torch(
    name: str, num_heads: int, num_kv_heads: int, head_size: int, rows: list[tuple[int, int]]
) -> None:
    shape = AttentionShape(
        num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5
    )
    size = kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    expected_pool = pool.float()
    plugin = importlib.import_module(f"aioengine.attention.{name}").PLUGIN
    backend, reference = plugin(shape, pool), TorchAttention(shape, expected_pool)
    for step in ([(160, 40), (0, 400), (0, 290)], rows):  # a later plan may reuse buffers of the first one
        batch = make_batch(step)
        size = len(batch.slot_mapping), num_heads + 2 * num_kv_heads, head_size
        heads = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)  # strided like those of models
        backend.prepare(batch)
        reference.prepare(replace(batch))
        for layer in range(2):
            actual = write_and_attend(backend, q, k, v, layer)
            expected = write_and_attend(reference, q.float(), k.float(), v.float(), layer)
            assert torch.equal(pool[layer].float(), expected_pool[layer]), "K and V in their slots"
            assert float((actual.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("rows", [ROWS["decodes"], ROWS["mixed, fresh ones last"], ROWS["decodes of many splits"]])
@pytest.mark.parametrize(
    ("windows", "soft_cap", "has_sinks"),
    [((300, None, 300), None, True), ((1, 1, 1), None, False), ((), 2.0, True), ((None, 40, None), 2.0, True)],
)
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_windows_caps_and_sinks_match_torch(
    name: str,
    windows: tuple[int | None, ...],
    soft_cap: float | None,
    has_sinks: bool,
    rows: list[tuple[int, int]],
) -> None:
    sinks = tuple(torch.randn(16, device="cuda") * 3 for _ in range(3)) if has_sinks else ()
    shape = AttentionShape(
        num_layers=3, num_heads=16, num_kv_heads=8, head_size=128, scale=128**-0.5,
        windows=windows, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
    sizes = [kv_pool_shape(shape.part(layers), num_pages=NUM_PAGES, page_size=PAGE_SIZE) for layers in shape.groups]
    pools = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    backend = _mixed.build(importlib.import_module(f"aioengine.attention.{name}").PLUGIN, shape, pools)
    reference = _mixed.build(TorchAttention, shape, [pool.float() for pool in pools])
    batch = make_batch(rows)
    heads = torch.randn(len(batch.slot_mapping), 32, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = heads.split((16, 8, 8), dim=1)
    backend.prepare(batch)
    reference.prepare(batch)
    for layer in range(3):
        actual = write_and_attend(backend, q, k, v, layer)
        expected = write_and_attend(reference, q.float(), k.float(), v.float(), layer)
        assert float((actual.float() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "window"),
    [(16, 8, 128, None), (7, 1, 64, None), (4, 2, 256, None), (8, 4, 128, 300)],
)
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_fixed_decode_rows_match_torch(
    name: str, num_heads: int, num_kv_heads: int, head_size: int, window: int | None
) -> None:
    """Steps of different lengths use the same buffers, as in a CUDA graph. The last rows are padding."""
    is_special = window is not None
    shape = AttentionShape(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5,
        windows=(window,), soft_cap=2.0 if is_special else None,
        sinks=(torch.randn(num_heads, device="cuda"),) if is_special else (),
    )  # fmt: skip
    size = kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    num_rows = 6
    memory = torch.zeros(4 * num_rows + 1 + NUM_PAGES, dtype=torch.int32, device="cuda")
    slot_mapping, last_lengths, starts, page_ids = memory.split(
        (num_rows, num_rows, num_rows + 1, NUM_PAGES + num_rows)
    )
    buffers = DecodeBuffers(
        slot_mapping=slot_mapping, starts=starts, last_lengths=last_lengths, page_ids=page_ids, max_pages=NUM_PAGES
    )
    plugin = importlib.import_module(f"aioengine.attention.{name}").PLUGIN
    fixed = plugin(shape, pool).fixed_decode(num_rows, buffers)
    for lengths in ([1, 16, 17, 300, 1, 1], [4000, 2, 900, 33, 1000, 1]):
        batch = make_batch([(length - 1, 1) for length in lengths])
        reference = TorchAttention(shape, pool.float())
        reference.prepare(batch)
        pages = [-(-length // PAGE_SIZE) for length in lengths]
        table = torch.cat([batch.page_table[row, :count] for row, count in enumerate(pages)])
        page_ids[: len(table)] = table
        slot_mapping.copy_(batch.slot_mapping)
        host_starts = torch.tensor([0, *np.cumsum(pages)], dtype=torch.int32)
        starts.copy_(host_starts)
        host_last = torch.tensor(lengths, dtype=torch.int32) - (torch.tensor(pages, dtype=torch.int32) - 1) * PAGE_SIZE
        last_lengths.copy_(host_last)
        fixed.plan(host_starts.numpy(), host_last.numpy())
        heads = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_size, device="cuda", dtype=torch.bfloat16)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        expected = write_and_attend(reference, q.float(), k.float(), v.float(), 0)
        first = write_and_attend(fixed, q, k, v, 0)
        assert float((first.float() - expected).norm() / expected.norm()) < 1e-2
        assert torch.equal(write_and_attend(fixed, q, k, v, 0), first), "the splits are put together in one order"


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 8), (32, 8)])
def test_prompts_with_shared_first_pages_match_torch(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int
) -> None:
    """The step also has rows of one token, rows without shared pages, and a complete prompt."""
    from aioengine.attention.flashinfer import FlashInferAttention

    monkeypatch.setattr(_shared_rows, "MIN_PAIRS", 1)
    shape = AttentionShape(num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128, scale=128**-0.5)
    size = kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    beginning = [order.pop() for _ in range(20)]
    sharing = [(320, 20), (330, 20), (352, 33), (327, 1), (320, 64)]
    rows = [(40, 1), (800, 1), (100, 7), *sharing, (64, 50), (0, 300)]
    tables = [[order.pop() for _ in range(-(-(start + count) // PAGE_SIZE))] for start, count in rows]
    for table in tables[3:8]:
        table[:20] = beginning
    batch = on_device(stepping.make_batch(rows, tables, PAGE_SIZE), torch.device("cuda"))
    host_pages = batch.page_table.cpu().numpy()
    backend, reference = FlashInferAttention(shape, pool), TorchAttention(shape, pool.float())
    actual = _shared_rows.find_shared(
        host_pages[2:-1], *(np.array(lengths[2:-1]) for lengths in (batch.query_lengths, batch.kv_lengths)), PAGE_SIZE
    )
    assert actual == (1, 6, 20)
    heads = torch.randn(len(batch.slot_mapping), num_heads + 2 * num_kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    reference.prepare(batch)
    expected = write_and_attend(reference, q.float(), k.float(), v.float(), 0)
    for pages in (host_pages, None):  # the second step shares nothing
        backend.prepare(replace(batch, host_pages=pages))
        given = write_and_attend(backend, q, k, v, 0)
        assert float((given.float() - expected).norm() / expected.norm()) < 1e-2
