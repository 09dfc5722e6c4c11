"""Attention of rows with the same first pages, which are read once for all rows: graphs, and comparisons with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from aioengine.attention._base import AttentionShape, DecodeBuffers, SharedPages, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.protocol.messages import Sampling
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import make_batch, write_and_attend
from tests.gpu.test_model_runner import on_device

if TYPE_CHECKING:
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs, DecodeStep
    from aioengine.runner.inputs import StepRows
    from aioengine.runner.request_row import SampledRows

    Replay = Callable[[StepRows, SampledRows], DecodeStep]
    Check = Callable[[DecodeGraphs, StepRows, SampledRows, Replay], DecodeStep]

PAGE_SIZE, NUM_PAGES = 16, 200


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (32, 8)])
def test_attention_matches_torch(num_heads: int, num_kv_heads: int) -> None:
    """Two groups, rows of no group, and rows of padding."""
    from aioengine.attention.flashinfer import CascadeFlashInferAttention

    shape = AttentionShape(num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128, scale=128**-0.5)
    size = kv_pool_shape(shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    pool = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    order = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    num_shared = [40, 40, 40, 7, 7, 0, 0]
    first, second = order[:40], order[40:47]
    rest = iter(order[47:])
    lengths = [40 * 16 + 1, 40 * 16 + 70, 40 * 16 + 16, 7 * 16 + 5, 7 * 16 + 300, 1, 500]
    beginnings = [first] * 3 + [second] * 2 + [[]] * 2
    tables = [
        begin + [next(rest) for _ in range(-(-length // 16) - len(begin))]
        for begin, length in zip(beginnings, lengths, strict=True)
    ]
    num_rows = 10  # three padding rows
    memory = torch.zeros(3 * num_rows + 1 + NUM_PAGES, dtype=torch.int32, device="cuda")
    slot_mapping, last_lengths, starts, page_ids = memory.split((num_rows, num_rows, num_rows + 1, NUM_PAGES))
    buffers = DecodeBuffers(
        slot_mapping=slot_mapping, starts=starts, last_lengths=last_lengths, page_ids=page_ids, max_pages=NUM_PAGES
    )
    cascade = CascadeFlashInferAttention(shape, pool).fixed_cascade(num_rows, buffers)
    batch = on_device(make_batch([(length - 1, 1) for length in lengths], tables, 16), torch.device("cuda"))
    own = [table[count:] for table, count in zip(tables, num_shared, strict=True)] + [[0]] * 3
    host_starts = torch.tensor([0, *np.cumsum([len(pages) for pages in own])], dtype=torch.int32)
    host_last = torch.tensor([*((length - 1) % 16 + 1 for length in lengths), 1, 1, 1], dtype=torch.int32)
    slot_mapping[: len(lengths)] = batch.slot_mapping
    starts.copy_(host_starts)
    last_lengths.copy_(host_last)
    page_ids[: int(host_starts[-1])] = torch.tensor([page for pages in own for page in pages], dtype=torch.int32)
    cascade.plan(host_starts.numpy(), host_last.numpy())
    shared = np.array(first + second, dtype=np.int32)
    cascade.plan_shared(SharedPages(np.array([3, 5], np.int32), np.array([40, 7], np.int32), shared))
    heads = torch.randn(num_rows, num_heads + 2 * num_kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    reference = TorchAttention(shape, pool.float())
    reference.prepare(batch)
    used = len(lengths)
    expected = write_and_attend(reference, q[:used].float(), k[:used].float(), v[:used].float(), 0)
    actual = write_and_attend(cascade, q, k, v, 0)
    assert actual.isfinite().all()
    assert float((actual[:used].float() - expected).norm() / expected.norm()) < 1e-2


PREFIXES = [[(3 * i + seed) % 290 + 1 for i in range(70)] for seed in (0, 7, 50)]
PROMPTS = [[*PREFIXES[i % 3], *((5 * i + j) % 290 + 1 for j in range(3 + i))] for i in range(15)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A runner that shares even a single page."""
    monkeypatch.setattr("aioengine.attention._flashinfer.MIN_ROWS", 3)
    monkeypatch.setattr("aioengine.attention._flashinfer.MIN_SAVED_BYTES", 1)
    heads = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    save_model("llama", tmp_path, dtype=torch.bfloat16, **heads)
    settings = make_settings(tmp_path, dtype="bfloat16", depth=1, page_size=PAGE_SIZE)
    runner = msgspec.structs.replace(
        settings.runner, device="cuda", attention_backend="flashinfer", cuda_graph_max_rows=16
    )
    return World(msgspec.structs.replace(settings, runner=runner))


def checked_steps(world: World, samplings: list[Sampling], check: Check) -> int:
    """Compute one batch with rows of three groups in turn. Return the number of steps with shared pages."""
    graphs = world.runner._graphs
    assert graphs is not None
    replay, prefixes = graphs.replay, graphs._prefixes
    assert prefixes is not None
    num_checked = 0

    def checked_replay(rows: StepRows, sampled: SampledRows, *, when_ready: Callable[[], None]) -> DecodeStep:
        nonlocal num_checked
        replay_now = partial(replay, when_ready=when_ready)
        if prefixes.find(rows) is None:
            return replay_now(rows, sampled)
        num_checked += 1
        return check(graphs, rows, sampled, replay_now)

    graphs.replay = checked_replay  # type: ignore[method-assign]
    world.answers(PROMPTS, samplings, max_new_tokens=20)
    world.runner.close()
    return num_checked


def test_rows_have_the_hidden_states_of_a_step_without_sharing(world: World) -> None:
    def check(graphs: DecodeGraphs, rows: StepRows, sampled: SampledRows, replay: Replay) -> DecodeStep:
        step = replay(rows, sampled)
        assert step.token_ids is None
        hidden = step.hidden.clone()
        prefixes, graphs._prefixes = graphs._prefixes, None
        plain = replay(rows, sampled).hidden
        graphs._prefixes = prefixes
        error = (hidden.float() - plain.float()).norm(dim=-1) / plain.float().norm(dim=-1)
        assert float(error.max()) < 0.2, "rounding of attention comes to 0.05 here, another row's would be far from it"
        return replace(step, hidden=hidden)

    samplings = [
        Sampling(i, temperature=0.7, top_k=20) for i in range(len(PROMPTS))
    ]  # tokens are sampled outside of the graph
    assert checked_steps(world, samplings, check) > 10


def test_rows_have_their_own_tokens(world: World) -> None:
    def check(graphs: DecodeGraphs, rows: StepRows, sampled: SampledRows, replay: Replay) -> DecodeStep:
        step = replay(rows, sampled)
        assert step.token_ids is not None
        remembered = world.runner._table.last_tokens[torch.from_numpy(rows.row_indices).cuda()]
        assert torch.equal(remembered, step.token_ids)
        logits = world.runner._model.compute_logits(step.hidden).float()
        chosen = logits.gather(1, step.token_ids[:, None])[:, 0]
        assert bool((chosen >= logits.amax(-1) - 0.02 * logits.abs().max()).all()), "the best, or as good"
        return step

    greedy = [Sampling(i, temperature=0.0) for i in range(len(PROMPTS))]
    assert checked_steps(world, greedy, check) > 10
