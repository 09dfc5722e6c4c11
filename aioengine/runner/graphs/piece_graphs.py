"""CUDA graphs of steps with prompts, in pieces: all operations except attention, whose shapes differ in every step.

Launched kernel by kernel, such a step takes about as much host time as device time. A new token count takes several
times as long, because libraries choose and load kernels and memory is allocated. So a step is padded to the next token
count of a ladder. Padding tokens belong to no row; their keys and values go to the padding page. The operations between
the attention of two layers are one graph. Attention is launched without a graph, only for the real tokens.

Graphs and attention exchange q, k, v and the attention outputs in buffers that all layers and sizes share.

T tokens of a graph, R rows, H query heads, K kv heads, E head size, V value size, D model size, N pages, S page size.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.attention._base import keys_and_values, split_heads
from aioengine.kernels.rotate_and_write import KVTarget
from aioengine.kernels.triton.launcher import compile_only
from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.graphs.padded_inputs import PaddedAdapters, PaddedInputs
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from aioengine.attention._base import AttentionShape, CapturableAttention, ForwardBatch
    from aioengine.models._base import Model, ModelInputs
    from aioengine.runner.lora.grouping import TileRows
    from aioengine.runner.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class _AttentionBuffers:
    """The buffers between graphs and attention.

    Attributes:
        heads: q, k and v as for ``split_heads``, written by graphs.
        attended: [T, H, V], the attention outputs, read by graphs.
    """

    heads: Tensor
    attended: Tensor

    def first(self, num_tokens: int) -> _AttentionBuffers:
        return _AttentionBuffers(self.heads[:num_tokens], self.attended[:num_tokens])


class _GraphSplitter:
    """Replaces attention during the capture: when a layer calls attention, one graph ends and the next begins."""

    def __init__(self, kv_pool: list[tuple[Tensor, Tensor]], slots: list[Tensor], buffers: _AttentionBuffers) -> None:
        """kv_pool: for each layer, keys [N, K, S, E] and values [N, K, S, V]. slots: for each layer, KV slots [T]."""
        self._kv_pool = kv_pool
        self._slots = slots
        self.buffers = buffers
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def copy(self) -> _GraphSplitter:
        """Return a splitter for another capture, with the same memory."""
        return _GraphSplitter(self._kv_pool, self._slots, self.buffers)

    @contextmanager
    def capture(self, pool: torch.cuda._POOL_HANDLE) -> Iterator[None]:
        """Capture the operations inside as ``graphs``: one before the attention of each layer, and one at the end."""
        self._pool = pool
        self._begin()
        try:
            yield
        finally:
            self._end()

    def target(self, layer: int) -> KVTarget:
        keys, values = self._kv_pool[layer]
        return KVTarget(self._slots[layer], keys, values, self.buffers.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """End a graph and begin the next. Return the memory [T, H * V] that attention writes between them."""
        if self.graphs:
            self._end()
            self._begin()
        return self.buffers.attended.flatten(1)

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool)

    def _end(self) -> None:
        self.graphs[-1].capture_end()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A captured step: its graphs, their inputs and buffers, and their result ``hidden`` [R, D]."""

    graphs: list[torch.cuda.CUDAGraph]
    inputs: PaddedInputs
    buffers: _AttentionBuffers
    hidden: Tensor


class PieceGraphs:
    """The graphs of a model, for each token count of the ladder."""

    def __init__(
        self,
        model: Model,
        attention: CapturableAttention,
        kv_layers: Sequence[Tensor],
        *,
        max_rows: int,
        adapters: TileRows | None = None,
        states: StatePool | None = None,
    ) -> None:
        """kv_layers: [1 or 2, N, K, S, E] of each layer. max_rows: maximum rows of a step."""
        self._states = states
        self._model = model
        self._attention = attention
        self._kv_pool = keys_and_values(kv_layers, model.attention_shape)
        self._group_of_layer = _group_of_layer(model.attention_shape)
        self._device = kv_layers[0].device
        self._max_rows = max_rows
        self._stream = torch.cuda.Stream(self._device)
        self._steps: dict[int, _Pieces] = {}  # ascending
        self._adapters = adapters
        self._steps_with_adapters: dict[int, _Pieces] = {}

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture a step of each size of the ladder up to ``max_tokens``.

        report: called after each size with the numbers of captured and of all sizes.
        """
        sizes = piece_ladder(max_tokens)
        shape, device = self._model.attention_shape, self._device
        inputs = PaddedInputs.zeros(self._model, max_tokens, self._max_rows, device, states=self._states)
        buffers = _AttentionBuffers(
            torch.zeros(max_tokens, shape.num_input_heads, shape.query_size, dtype=self._model.dtype, device=device),
            torch.zeros(max_tokens, shape.num_heads, shape.output_size, dtype=self._model.dtype, device=device),
        )
        adapters: PaddedAdapters | None = None
        if self._adapters is not None:
            adapters = PaddedAdapters(max_tokens, self._max_rows, self._adapters, device)
        pool = torch.cuda.graph_pool_handle()
        captured: dict[int, _Pieces] = {}
        for num_done, size in enumerate(reversed(sizes), 1):
            num_rows = min(self._max_rows, size)  # each has at least one token
            step = inputs.first(size, num_rows)
            slots = [step.slots[group] for group in self._group_of_layer]
            splitter = _GraphSplitter(self._kv_pool, slots, buffers.first(size))
            # Run the kernels once first: they must not be compiled or loaded during the capture.
            if size in (max_tokens, num_rows):
                self._compute(step, splitter)
            else:  # one block is enough: the other operations ran with the largest step
                self._model.forward_block(size, splitter)
            captured[size] = self._captured(step, splitter, pool)
            if adapters is not None:
                step, splitter = step.with_adapters(adapters), splitter.copy()
                with compile_only():
                    self._compute(step, splitter)
                self._compute(step, splitter)
                self._steps_with_adapters[size] = self._captured(step, splitter, pool)
            report(num_done, len(sizes))
        self._steps = {size: captured[size] for size in sizes}

    def fits(self, batch: ForwardBatch) -> bool:
        """Return whether there are graphs for this step."""
        num_rows, num_tokens = len(batch.query_lengths), len(batch.slot_mapping)
        return num_rows <= self._max_rows and any(num_tokens <= size for size in self._steps)

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue the step, which must fit. Return the hidden states [R, D] of the last token of each row."""
        num_tokens = len(batch.slot_mapping)
        size = next(size for size in self._steps if num_tokens <= size)
        chosen = (self._steps if inputs.adapters is None else self._steps_with_adapters)[size]
        first, *later = chosen.graphs
        with part("prepare"):
            chosen.inputs.fill(inputs, batch)
            if num_tokens < size:  # attention does not write the padding, but graphs read it: keep it finite
                chosen.buffers.attended[num_tokens:].zero_()
        first.replay()  # the device begins while the host plans attention
        with part("prepare"):
            self._attention.prepare(batch)
        buffers = chosen.buffers.first(num_tokens)
        q, k, v = split_heads(buffers.heads, self._model.attention_shape)
        for layer, graph in enumerate(later):
            self._attention.attend_into(q, k, v, layer, out=buffers.attended)
            graph.replay()
        return chosen.hidden[: len(batch.query_lengths)]

    def _compute(self, inputs: PaddedInputs, splitter: _GraphSplitter) -> Tensor:
        """Return the hidden states [R, D]."""
        return self._model.forward(inputs.inputs, splitter)

    def _captured(self, inputs: PaddedInputs, splitter: _GraphSplitter, pool: torch.cuda._POOL_HANDLE) -> _Pieces:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), splitter.capture(pool):
            hidden = self._compute(inputs, splitter)
        for graph in splitter.graphs:
            graph.replay()  # the first replay takes longer than later ones
        return _Pieces(splitter.graphs, inputs, splitter.buffers, hidden)


def _group_of_layer(shape: AttentionShape) -> list[int]:
    """Return the index of the page table of each layer."""
    if not shape.page_windows:
        return [0] * shape.num_layers
    return [group for _, group in sorted((layer, i) for i, layers in enumerate(shape.groups) for layer in layers)]
