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

from aioengine.attention._base import AttentionShape, CapturableAttention, ForwardBatch, keys_and_values, split_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.launcher import compile_only
from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.graphs.padded_inputs import PaddedAdapters, PaddedInputs
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from aioengine.models._base import Model, ModelInputs
    from aioengine.runner.lora.grouping import TileRows
    from aioengine.runner.state_pool import StatePool


class _GraphSplitter:
    """Replaces attention during the capture: when a layer calls attention, one graph ends and the next begins."""

    def __init__(
        self,
        shape: AttentionShape,
        kv_pool: list[tuple[Tensor, Tensor]],
        slots: dict[int, Tensor],
        heads: Tensor,
        attended: Tensor,
    ) -> None:
        """
        Args:
            kv_pool: keys [N, K, S, E] and values [N, K, S, V] of each layer.
            slots: layer -> KV slots [T].
            heads: q, k and v as for ``split_heads``, written by graphs.
            attended: [T, H, V], the attention outputs, read by graphs.
        """
        self._shape = shape
        self._kv_pool = kv_pool
        self._slots = slots
        self._heads = heads
        self._attended = attended
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # of the running capture

    @contextmanager
    def capture(self, pool: torch.cuda._POOL_HANDLE) -> Iterator[list[torch.cuda.CUDAGraph]]:
        """Capture the operations inside as several graphs: one before the attention of each layer, and one at the end.
        Yields the list of graphs.
        """
        graphs = self._graphs
        self._pool = pool
        self._begin()
        try:
            yield graphs
        finally:
            graphs[-1].capture_end()
            self._graphs = []

    def target(self, layer: int) -> KVTarget:
        keys, values = self._kv_pool[layer]
        return KVTarget(self._slots[layer], keys, values, self._heads, self._shape.scales(layer))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """End a graph and begin the next. Return the memory [T, H * V] that attention writes between them."""
        if self._graphs:
            self._graphs[-1].capture_end()
            self._begin()
        return self._attended.flatten(1)

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._pool)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A captured step: its graphs, their inputs, and their result ``hidden`` [R, D]."""

    graphs: list[torch.cuda.CUDAGraph]
    inputs: PaddedInputs
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
        shape = model.attention_shape
        self._states = states
        self._model = model
        self._attention = attention
        self._kv_pool = keys_and_values(kv_layers, shape)
        self._groups = shape.groups if shape.page_windows else (tuple(range(shape.num_layers)),)
        self._device = kv_layers[0].device
        self._max_rows = max_rows
        self._stream = torch.cuda.Stream(self._device)
        self._heads = self._attended = torch.empty(0)  # the buffers between graphs and attention
        self._steps: dict[int, _Pieces] = {}  # ascending
        self._adapters = adapters
        self._steps_with_adapters: dict[int, _Pieces] = {}

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture a step of each size of the ladder up to ``max_tokens``.

        report: called after each size with the numbers of captured and of all sizes.
        """
        model, device, tiles = self._model, self._device, self._adapters
        shape, sizes = model.attention_shape, piece_ladder(max_tokens)
        inputs = PaddedInputs.zeros(model, max_tokens, self._max_rows, device, states=self._states)
        heads_size = max_tokens, shape.num_input_heads, shape.query_size
        self._heads = torch.zeros(heads_size, dtype=model.dtype, device=device)
        attended_size = max_tokens, shape.num_heads, shape.output_size
        self._attended = torch.zeros(attended_size, dtype=model.dtype, device=device)
        adapters = None if tiles is None else PaddedAdapters(max_tokens, self._max_rows, tiles, device)
        pool = torch.cuda.graph_pool_handle()
        captured: dict[int, _Pieces] = {}
        for num_done, size in enumerate(reversed(sizes), 1):
            num_rows = min(self._max_rows, size)  # each has at least one token
            step = inputs.for_graph(size, num_rows)
            slots = {layer: slots for slots, layers in zip(step.slots, self._groups, strict=True) for layer in layers}
            splitter = _GraphSplitter(shape, self._kv_pool, slots, self._heads[:size], self._attended[:size])
            # Run the kernels once first: they must not be compiled or loaded during the capture.
            if size in (max_tokens, num_rows):
                model.forward(step.inputs, splitter)
            else:  # one block is enough: the other operations ran with the largest step
                model.forward_block(size, splitter)
            captured[size] = self._captured(step, splitter, pool)
            if adapters is not None:
                step = step.with_adapters(adapters)
                with compile_only():
                    model.forward(step.inputs, splitter)
                model.forward(step.inputs, splitter)
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
                self._attended[num_tokens:size].zero_()
        first.replay()  # the device begins while the host plans attention
        with part("prepare"):
            self._attention.prepare(batch)
        attended = self._attended[:num_tokens]
        q, k, v = split_heads(self._heads[:num_tokens], self._model.attention_shape)
        for layer, graph in enumerate(later):
            self._attention.attend_into(q, k, v, layer, out=attended)
            graph.replay()
        return chosen.hidden[: len(batch.query_lengths)]

    def _captured(self, inputs: PaddedInputs, splitter: _GraphSplitter, pool: torch.cuda._POOL_HANDLE) -> _Pieces:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream), splitter.capture(pool) as graphs:
            hidden = self._model.forward(inputs.inputs, splitter)
        for graph in graphs:
            graph.replay()  # the first replay takes longer than later ones
        return _Pieces(graphs, inputs, hidden)
