"""CUDA graphs of decode steps on a CPU: a replay computes the step again, and writes its results to the same memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aioengine.attention._base import CascadeLimits, ForwardBatch
from aioengine.attention.torch import TorchAttention
from aioengine.runner.graphs import decode_graphs
from aioengine.runner.graphs.decode_inputs import LAST_LENGTHS, POSITIONS, REJECTED, SLOTS, TABLES, TARGETS
from aioengine.runner.request_row import SampledRows
from aioengine.runner.rows import SAMPLING_RECORD
from aioengine.runner.sampling.sampler import FAILED, Sampler
from aioengine.runner.speculation.verifier import num_accepted

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, SharedPages
    from aioengine.kernels.arrays import Ints32
    from aioengine.kernels.triton.sampling import Draws
    from aioengine.runner.model_runner import ModelRunner


class FixedRows(TorchAttention):
    """Implements ``FixedDecode``. Its first layer prepares the step in the buffers."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor, num_rows: int, buffers: DecodeBuffers) -> None:
        super().__init__(shape, kv_pool)
        self.max_row_tokens = buffers.max_row_tokens
        self._num_rows = num_rows
        self._buffers = buffers
        self._tables = np.arange(num_rows + 1, dtype=np.int32)
        self._shared: list[list[int]] = [[]] * num_rows  # pages before the pages in the buffers

    def plan(self, starts: Ints32, last_lengths: Ints32, tables: Ints32 | None = None) -> None:
        self._tables = np.arange(self._num_rows + 1, dtype=np.int32) if tables is None else tables

    def target(self, layer: int) -> Any:
        if not layer:
            self._read()
        return super().target(layer)

    def _read(self) -> None:
        buffers, starts = self._buffers, self._buffers.starts.tolist()
        table_of_row = np.repeat(np.arange(len(self._tables) - 1), np.diff(self._tables))
        counts = np.diff(starts)[table_of_row] + np.array([len(shared) for shared in self._shared])
        pages = torch.zeros(self._num_rows, counts.max(), dtype=torch.int32)
        for row, (table, count) in enumerate(zip(table_of_row.tolist(), counts.tolist(), strict=True)):
            own = buffers.page_ids[starts[table] : starts[table + 1]]
            pages[row, :count] = torch.cat((torch.tensor(self._shared[row], dtype=torch.int32), own))
        kv_lengths = (counts - 1) * self.page_size + buffers.last_lengths.numpy()
        self.prepare(
            ForwardBatch(
                slot_mapping=buffers.slot_mapping.long(),
                page_table=pages,
                query_lengths=[1] * self._num_rows,
                kv_lengths=kv_lengths.tolist(),
            )
        )


class FixedSharedRows(FixedRows):
    """Implements ``FixedCascade``."""

    def plan_shared(self, pages: SharedPages) -> None:
        first_row, first_page, self._shared = 0, 0, [[]] * self._num_rows
        for end, num_pages in zip(pages.row_ends.tolist(), pages.num_pages.tolist(), strict=True):
            shared = pages.page_ids[first_page : first_page + num_pages].tolist()
            self._shared[first_row:end] = [shared] * (end - first_row)
            first_row, first_page = end, first_page + num_pages


class CapturableTorch(TorchAttention):
    """Implements ``CapturableAttention``."""

    def warm_up(self) -> None:
        pass

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedRows:
        return FixedRows(self._shape, self._pool, num_rows, buffers)

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        def attend(layer: int) -> None:
            out.copy_(self.attend(q, k, v, layer).view_as(out))

        return attend


class CascadeTorch(CapturableTorch):
    """Implements ``CascadeAttention``."""

    cascade_limits = CascadeLimits(min_rows=3, min_saved=1, max_groups=3)

    def fixed_cascade(self, num_rows: int, buffers: DecodeBuffers) -> FixedSharedRows:
        return FixedSharedRows(self._shape, self._pool, num_rows, buffers)


class Kernels:
    """Replaces ``SamplingKernels``."""

    def __init__(self, *, max_rows: int, vocab_size: int, **_: object) -> None:
        table: Any = SimpleNamespace(sampling=np.zeros(max_rows), num_embeddings=vocab_size, processors=())
        self._sampler = Sampler(vocab_size, table)

    def sample(self, logits: Tensor, draws: Draws, out: Tensor, last_tokens: tuple[Tensor, Tensor]) -> None:
        fields = draws.fields.numpy()
        records = np.zeros(len(logits), dtype=SAMPLING_RECORD)
        records["is_plain_greedy"] = records["is_greedy"] = fields[4] != 0
        records["seed"] = fields[0].view(np.uint32) + (fields[1].view(np.uint32).astype(np.uint64) << np.uint64(32))
        records["temperature"] = 1 / np.maximum(fields[3].view(np.float32), np.float32(1e-3))
        rows = SampledRows([], np.arange(len(logits)), fields[2].astype(np.int64), records)
        indices, tokens = last_tokens
        is_sampled = indices >= 0
        out.copy_(torch.where(is_sampled, self._sampler.sample(logits, rows), FAILED))
        tokens[indices[is_sampled].long()] = out[is_sampled].clamp(min=0)


def accept(spans: Tensor, token_ids: Tensor, sources: Tensor, last_tokens: Tensor, rejected: Tensor) -> None:
    """Replaces ``kernels.triton.drafts.accept``."""
    stride = len(rejected) - 1
    for row, first, num_drafts, num_planned, stored in spans.T.tolist():
        drafts = last_tokens[sources[first + 1 : first + num_drafts + 1].long()].tolist()
        sampled = token_ids[first : first + num_drafts + 1].tolist()
        count = num_accepted(drafts, sampled)
        last_tokens[row] = max(sampled[count], 0)
        for number, token_id in enumerate(sampled):
            last_tokens[stored - number * stride] = max(token_id, 0)
        rejected[row] = num_planned - count


def move_rows(
    columns: Tensor, pages: tuple[Tensor, Tensor], rejected: Tensor, *, sampled: int, page_size: int, lag: int
) -> None:
    """Replaces ``kernels.triton.drafts.move_rows``."""
    starts, page_ids = pages
    later = rejected[columns[REJECTED].long()]
    columns[sampled] -= later
    is_exact = columns[TABLES] < 0
    is_last = columns[POSITIONS] + 1 + lag == columns[sampled]
    columns[TARGETS] = torch.where(is_exact & ~is_last, -1, columns[TARGETS])
    later = torch.where(is_exact, 0, later)
    for index in (POSITIONS, LAST_LENGTHS):
        columns[index] -= later
    tables = columns[TABLES].clamp(min=0).long()
    indices = (starts[tables + 1] - starts[tables] - 1) * page_size + columns[LAST_LENGTHS] - 1
    slots = page_ids[(starts[tables] + indices // page_size).long()] * page_size + indices % page_size
    columns[SLOTS] = torch.where(later > 0, slots, columns[SLOTS])


class SimulatedGraphs(decode_graphs.DecodeGraphs):
    """num_replayed: number of replayed steps, and of those that verify drafts."""

    num_replayed = (0, 0)

    def replay_with_drafts(self, *arguments: Any) -> decode_graphs.DecodeStep:
        self.num_replayed = self.num_replayed[0], self.num_replayed[1] + 1
        return super().replay_with_drafts(*arguments)

    def _run(self, *arguments: Any) -> decode_graphs._Graph:
        self.num_replayed = self.num_replayed[0] + 1, self.num_replayed[1]
        graph = super()._run(*arguments)
        # on a CPU, the tokens of a step in flight are not copied
        return replace(graph, token_ids=graph.token_ids.clone())

    def draw(self, step: decode_graphs.DecodeStep, logits: Tensor) -> Tensor:
        return super().draw(step, logits).clone()

    def _captured(self, size: int, attention: Any, pool: object, tiles: Any = None) -> Any:
        compute = self._step_function(self._model, size, attention, tiles)
        results = compute()

        def replay() -> None:
            for result, computed in zip(results, compute(), strict=True):
                result.copy_(computed)

        hidden, logits, token_ids = results
        address: Any = SimpleNamespace(tensor=lambda _: logits)
        return decode_graphs._Graph(size, SimpleNamespace(replay=replay), attention, hidden, token_ids, address)  # type: ignore[arg-type]


def capture(runner: ModelRunner, max_rows: int, kind: type[TorchAttention] = CapturableTorch) -> None:
    """Capture the graphs of a runner, after ``simulate_graphs``. kind: of the attention."""
    proposer = runner._proposer
    model = None if proposer is None else proposer._model
    for attention in (runner._attention, None if model is None else model._parts.attention):
        if attention is not None:
            attention.__class__ = kind  # type: ignore[assignment]
    runner.capture_graphs(max_rows, lambda *_: None)


def simulate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``ModelRunner.capture_graphs`` work on a CPU."""
    monkeypatch.setattr(decode_graphs, "SamplingKernels", Kernels)
    monkeypatch.setattr(decode_graphs, "accept", accept)
    monkeypatch.setattr(decode_graphs, "move_rows", move_rows)
    monkeypatch.setattr(decode_graphs, "DecodeGraphs", SimulatedGraphs)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
