"""CUDA graphs of steps with prompts, in pieces: everything except attention, whose shapes differ in every step.

Launched kernel by kernel, such a step takes about as much host time as device time, and several times as much for a
token count seen for the first time: libraries choose and load kernels, and memory is allocated. So a step is padded to
the next token count of a ladder. The padding tokens belong to no row; their keys and values go to the padding page. The
operations between the attention of one layer and of the next are one graph. Attention itself is launched without a
graph, and only for the real tokens.

Graphs and attention exchange q, k, v and the attention outputs in memory that all layers and sizes share.

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
class _Handed:
    """The buffers between graphs and attention.

    Attributes:
        heads: q, k and v as ``split_heads`` takes them: graphs write them, attention reads them.
        attended: [T, H, V], the outputs of attention, which graphs read.
    """

    heads: Tensor
    attended: Tensor

    def first(self, num_tokens: int) -> _Handed:
        return _Handed(self.heads[:num_tokens], self.attended[:num_tokens])


class _Seams:
    """Stands in for attention during the capture: where a layer calls attention, one graph ends and the next begins."""

    def __init__(self, kv_pool: list[tuple[Tensor, Tensor]], slots: list[Tensor], handed: _Handed) -> None:
        """Of each layer, kv_pool: keys [N, K, S, E] and values [N, K, S, V]; slots: [T], where those of tokens go."""
        self._kv_pool = kv_pool
        self._slots = slots
        self.handed = handed
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def anew(self) -> _Seams:
        """For another capture, with the same memory."""
        return _Seams(self._kv_pool, self._slots, self.handed)

    @contextmanager
    def capture(self, pool: torch.cuda._POOL_HANDLE) -> Iterator[None]:
        """Capture the operations inside as ``graphs``: one before each layer's attention, and one behind the last."""
        self._pool = pool
        self._begin()
        try:
            yield
        finally:
            self._end()

    def target(self, layer: int) -> KVTarget:
        keys, values = self._kv_pool[layer]
        return KVTarget(self._slots[layer], keys, values, self.handed.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """End a graph and begin the next; returns the memory [T, H * V] that attention writes between them."""
        if self.graphs:
            self._end()
            self._begin()
        return self.handed.attended.flatten(1)

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool)

    def _end(self) -> None:
        self.graphs[-1].capture_end()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A captured step: its graphs, the inputs and buffers that they read, and ``hidden`` [R, D], which they write."""

    graphs: list[torch.cuda.CUDAGraph]
    inputs: PaddedInputs
    handed: _Handed
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
        """kv_layers: [1 or 2, N, K, S, E] of each layer. max_rows: of a step. adapters, states: None where there are
        none.
        """
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

        ``report`` is called behind each, with the number of captured sizes and of all.
        """
        sizes = piece_ladder(max_tokens)
        shape, device = self._model.attention_shape, self._device
        inputs = PaddedInputs.zeros(self._model, max_tokens, self._max_rows, device, states=self._states)
        handed = _Handed(
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
            seams = _Seams(self._kv_pool, [step.slots[group] for group in self._group_of_layer], handed.first(size))
            # Run the kernels once before: they must not be compiled or loaded during the capture.
            if size in (max_tokens, num_rows):
                self._compute(step, seams)
            else:  # one block is enough: the other operations ran with the largest step
                self._model.forward_block(size, seams)
            captured[size] = self._captured(step, seams, pool)
            if adapters is not None:
                step, seams = step.with_adapters(adapters), seams.anew()
                with compile_only():
                    self._compute(step, seams)
                self._compute(step, seams)
                self._steps_with_adapters[size] = self._captured(step, seams, pool)
            report(num_done, len(sizes))
        self._steps = {size: captured[size] for size in sizes}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there are graphs for this step."""
        num_rows, num_tokens = len(batch.query_lengths), len(batch.slot_mapping)
        return num_rows <= self._max_rows and any(num_tokens <= size for size in self._steps)

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue the step, which must fit; returns the hidden states [R, D] of the last token of each row."""
        num_tokens = len(batch.slot_mapping)
        size = next(size for size in self._steps if num_tokens <= size)
        chosen = (self._steps if inputs.adapters is None else self._steps_with_adapters)[size]
        first, *others = chosen.graphs
        with part("prepare"):
            chosen.inputs.fill(inputs, batch)
            if num_tokens < size:  # attention skips the padding, graphs read it: keep it finite
                chosen.handed.attended[num_tokens:].zero_()
        first.replay()  # the device begins while the host plans attention
        with part("prepare"):
            self._attention.prepare(batch)
        there = chosen.handed.first(num_tokens)
        q, k, v = split_heads(there.heads, self._model.attention_shape)
        for layer, graph in enumerate(others):
            self._attention.attend_into(q, k, v, layer, out=there.attended)
            graph.replay()
        return chosen.hidden[: len(batch.query_lengths)]

    def _compute(self, inputs: PaddedInputs, seams: _Seams) -> Tensor:
        """Hidden states [R, D]."""
        return self._model.forward(inputs.inputs, seams)

    def _captured(self, inputs: PaddedInputs, seams: _Seams, pool: torch.cuda._POOL_HANDLE) -> _Pieces:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), seams.capture(pool):
            hidden = self._compute(inputs, seams)
        for graph in seams.graphs:
            graph.replay()  # the first replay takes longer than the others
        return _Pieces(seams.graphs, inputs, seams.handed, hidden)


def _group_of_layer(shape: AttentionShape) -> list[int]:
    """By layer, the group whose page table it has."""
    if not shape.page_windows:
        return [0] * shape.num_layers
    return [group for _, group in sorted((layer, i) for i, layers in enumerate(shape.groups) for layer in layers)]
