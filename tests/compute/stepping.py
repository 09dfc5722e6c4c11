"""Runs a model over the paged pool like a runner, in steps that a test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aioengine.attention import _mixed
from aioengine.attention._base import ForwardBatch, StepAttention, kv_pool_shape
from aioengine.attention.fused import FusedAttention, supports
from aioengine.attention.torch import TorchAttention
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.state_types import StateRows
from aioengine.layers.mixer import StepStates
from aioengine.models._base import Model, ModelInputs, ModelOptions
from aioengine.runner.inputs import model_inputs
from aioengine.runner.state_pool import StatePool

NUM_SLOTS = 16


@dataclass
class Request:
    """Token ids, the number of computed tokens, pages, the slot of states, and the logits of all computed positions."""

    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int = -1
    logits: list[Tensor] = field(default_factory=list)


def options(dtype: torch.dtype = torch.float32, max_positions: int = 512) -> ModelOptions:
    return ModelOptions(dtype=dtype, device=torch.device("cpu"), max_positions=max_positions)


def make_batch(rows: list[tuple[int, int]], tables: list[list[int]], page_size: int) -> ForwardBatch:
    """Return a batch of rows of (start, count) with these page tables."""
    slots = [
        table[position // page_size] * page_size + position % page_size
        for (start, count), table in zip(rows, tables, strict=True)
        for position in range(start, start + count)
    ]
    width = max(len(table) for table in tables)
    return ForwardBatch(
        slot_mapping=torch.tensor(slots),
        page_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        query_lengths=[count for _, count in rows],
        kv_lengths=[start + count for start, count in rows],
    )


def write_and_attend(attention: StepAttention, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Write k and v [T, K, E] to the KV pool, and attend with q [T, H, E] -> [T, H * E]."""
    target = attention.target(layer)
    if isinstance(target, KVTarget):
        target.write(k, v)
    else:
        target(k, v)
    return attention.attend(q, k, v, layer)


def make_inputs(model: Model, rows: list[tuple[int, int]], token_ids: Tensor | None = None) -> ModelInputs:
    """Return inputs of rows of (start, count) with their last tokens as outputs. By default, ids are random."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    counts = torch.tensor([count for _, count in rows])
    return model_inputs(
        model,
        torch.randint(1, 290, positions.shape) if token_ids is None else token_ids,
        positions,
        rows=torch.arange(len(rows)).repeat_interleave(counts) if model.input_spec.rows else None,
        outputs=counts.cumsum(0) - 1,
    )


class Stepper:
    """A model and a pool. Pages are allocated in random order, and slots of states in order."""

    def __init__(self, model: Model, *, page_size: int = 16, num_pages: int = 128) -> None:
        self.model = model
        self.page_size = page_size
        shape = model.attention_shape
        pools = [
            torch.zeros(kv_pool_shape(shape.part(layers), num_pages=num_pages, page_size=page_size)).to(model.dtype)
            for layers in shape.groups
        ]
        plugin = FusedAttention if supports(shape, model.dtype, torch.device("cpu")) else TorchAttention
        self.attention = _mixed.build(plugin, shape, pools)
        generator = torch.Generator().manual_seed(0)
        self._states: StatePool | None = None
        if model.state_shape is not None:
            self._states = StatePool(model.state_shape, max_rows=NUM_SLOTS, device=torch.device("cpu"))
        self._num_slots = 0
        self.free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()

    def step(self, rows: list[tuple[Request, int]]) -> None:
        """Compute the next ``count`` tokens of each request."""
        for request, count in rows:
            if request.slot < 0:
                request.slot, self._num_slots = self._num_slots % NUM_SLOTS, self._num_slots + 1
            while len(request.pages) * self.page_size < request.num_computed + count:
                request.pages.append(self.free.pop())
        spans = [(request.num_computed, count) for request, count in rows]
        batch = make_batch(spans, [request.pages for request, _ in rows], self.page_size)
        tokens = [
            token
            for request, count in rows
            for token in request.token_ids[request.num_computed : request.num_computed + count]
        ]
        self.attention.prepare(batch)
        inputs = replace(make_inputs(self.model, spans, torch.tensor(tokens)), outputs=None)
        if short_length := self.model.input_spec.short_length:
            shifts = [short_length * (len(request.token_ids) > short_length) for request, _ in rows]
            counts = torch.tensor([count for _, count in rows])
            inputs = replace(inputs, positions=inputs.positions + torch.tensor(shifts).repeat_interleave(counts))
        if self._states is not None:
            starts, counts = torch.tensor(spans).unbind(1)
            state_rows = StateRows(torch.tensor([request.slot for request, _ in rows]), starts, counts.cumsum(0))
            inputs = replace(inputs, states=StepStates(self._states.tensors, state_rows))
        hidden = self.model.forward(inputs, self.attention)
        logits = self.model.compute_logits(hidden).split([count for _, count in rows])
        for (request, count), part in zip(rows, logits, strict=True):
            request.logits.extend(part.unbind(0))
            request.num_computed += count

    def run(self, token_ids: list[int], chunks: list[int]) -> Tensor:
        """Return the logits [tokens, V] of one request that is computed in these chunks and then token by token."""
        request = Request(token_ids)
        for count in chunks:
            self.step([(request, count)])
        while request.num_computed < len(token_ids):
            self.step([(request, 1)])
        self.free.extend(request.pages)
        return torch.stack(request.logits)


def check_bits(ours: Model, token_ids: Tensor, whole: Tensor) -> None:
    """Check that logits of 50 token_ids [T] equal ``whole`` [T, V] bit for bit in other chunks and batches."""
    assert torch.equal(Stepper(ours, page_size=4).run(token_ids.tolist(), [7, 20, 1, 19]), whole)
    together = Stepper(ours)
    requests = [Request(token_ids.tolist()), Request(token_ids.flip(0).tolist()), Request(token_ids[:9].tolist())]
    together.step([(request, count) for request, count in zip(requests, (30, 2, 9), strict=True)])
    together.step([(requests[1], 48), (requests[0], 20)])
    assert torch.equal(torch.stack(requests[0].logits), whole)
