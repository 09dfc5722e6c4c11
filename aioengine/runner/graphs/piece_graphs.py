"""CUDA graphs of steps with prompts, in pieces: all operations except attention, whose shapes differ in every step.

Launched kernel by kernel, such a step takes about as much host time as device time. A new token count takes several
times as long, because libraries choose and load kernels and memory is allocated. So a step is padded to the next token
count of a ladder (``PaddedInputs``). Padding tokens belong to no row; their keys and values go to the padding page.

The operations between the attention of two layers are one graph. Attention is launched without a graph, only for the
real tokens. Graphs and attention exchange q, k, v and the attention outputs in buffers that all layers and sizes share.

T tokens of a graph, R rows, H query heads, K kv heads, E head size, V value size, O output size, D model size, N pages,
S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, CapturableAttention, ForwardBatch, keys_and_values, split_heads
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.launcher import compile_only
from aioengine.models._base import Model, ModelInputs
from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.lora.grouping import FixedAdapters, FixedTiles, StepAdapters, TileRows
from aioengine.runner.state_pool import StatePool, states_for_graph
from aioengine.runner.timing import profiled


@dataclass(eq=False, slots=True)
class _GraphSplitter:
    """Replaces attention during the capture: when a layer calls attention, one graph ends and the next begins.

    Attributes:
        kv_pool: keys [N, K, S, E] and values [N, K, S, V] of each layer.
        slots: layer -> KV slots [T].
        heads: q, k and v as for ``split_heads``, written by graphs.
        attended: [T, H, O], the attention outputs, read by graphs.
        pool: the memory pool of the graphs.
        graphs: of the running capture.
    """

    shape: AttentionShape
    kv_pool: list[tuple[Tensor, Tensor]]
    slots: dict[int, Tensor]
    heads: Tensor
    attended: Tensor
    pool: torch.cuda._POOL_HANDLE
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)

    @contextmanager
    def capture(self) -> Iterator[list[torch.cuda.CUDAGraph]]:
        """Capture the operations inside as several graphs: one before the attention of each layer, and one at the end.
        Yields the list of graphs.
        """
        self._begin()
        try:
            yield self.graphs
        finally:
            self.graphs[-1].capture_end()
            self.graphs = []

    def target(self, layer: int) -> KVTarget:
        keys, values = self.kv_pool[layer]
        return KVTarget(self.slots[layer], keys, values, self.heads, self.shape.scales(layer))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """End a graph and begin the next. Return the memory [T, H * O] that attention writes between them."""
        if self.graphs:
            self.graphs[-1].capture_end()
            self._begin()
        return self.attended.flatten(1)

    def _begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self.pool)


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
        max_outputs: int,
        adapters: TileRows | None = None,
        states: StatePool | None = None,
    ) -> None:
        """kv_layers: [1 or 2, N, K, S, E] of each layer. max_outputs: maximum hidden states that a step returns."""
        shape = model.attention_shape
        self._states = states
        self._model = model
        self._attention = attention
        self._kv_pool = keys_and_values(kv_layers, shape)
        self._groups = shape.groups if shape.page_windows else (tuple(range(shape.num_layers)),)
        self._device = kv_layers[0].device
        self._max_outputs = max_outputs
        self._stream = torch.cuda.Stream(self._device)
        self._heads = self._attended = torch.empty(0)  # the buffers between graphs and attention
        self._steps: dict[int, _Pieces] = {}  # descending
        self._adapters = adapters
        self._steps_with_adapters: dict[int, _Pieces] = {}

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture a step of each size of the ladder up to ``max_tokens``.

        report: called after each size with the numbers of captured and of all sizes.
        """
        model, short, device, tiles = self._model, self._model.shortened(), self._device, self._adapters
        shape, sizes = model.attention_shape, piece_ladder(max_tokens)
        inputs = PaddedInputs.zeros(model, max_tokens, self._max_outputs, device, states=self._states)
        zeros = partial(torch.zeros, max_tokens, dtype=model.dtype, device=device)
        self._heads = zeros(shape.num_input_heads, shape.query_size)
        self._attended = zeros(shape.num_heads, shape.output_size)
        adapters = None
        if tiles is not None:
            adapters = FixedTiles(max_tokens, tiles, device), FixedTiles(self._max_outputs, tiles, device)
        pool = torch.cuda.graph_pool_handle()
        for num_done, size in enumerate(reversed(sizes), 1):
            num_outputs = min(self._max_outputs, size)  # see ``fits``
            step = inputs.for_graph(size, num_outputs)
            slots = {layer: slots for slots, layers in zip(step.slots, self._groups, strict=True) for layer in layers}
            splitter = _GraphSplitter(shape, self._kv_pool, slots, self._heads[:size], self._attended[:size], pool)
            # Run the kernels once first: they must not be compiled or loaded during the capture.
            (model if size == max_tokens else short).forward(step.inputs, splitter)
            self._steps[size] = self._captured(step, splitter)
            if adapters is not None:
                step = step.with_adapters(adapters)
                with compile_only():
                    model.forward(step.inputs, splitter)
                model.forward(step.inputs, splitter)
                self._steps_with_adapters[size] = self._captured(step, splitter)
            report(num_done, len(sizes))

    def _padded(self, num_tokens: int) -> int:
        """Return the token count of the smallest graphs for ``num_tokens`` tokens, or 0 if none are large enough."""
        return next((size for size in reversed(self._steps) if num_tokens <= size), 0)

    def fits(self, batch: ForwardBatch, num_outputs: int) -> bool:
        """Return whether there are graphs for this step, which returns ``num_outputs`` hidden states."""
        return num_outputs <= min(self._padded(len(batch.slot_mapping)), self._max_outputs)

    def replay(self, inputs: ModelInputs, batch: ForwardBatch, num_outputs: int) -> Tensor:
        """Queue the step, which must fit. Return the hidden states [num_outputs, D] of the first ``inputs.outputs``."""
        num_tokens = len(batch.slot_mapping)
        size = self._padded(num_tokens)
        chosen = (self._steps if inputs.adapters is None else self._steps_with_adapters)[size]
        first, *later = chosen.graphs
        with profiled("prepare"):
            chosen.inputs.fill(inputs, batch, num_outputs)
            if num_tokens < size:  # attention does not write the padding, but graphs read it: keep it finite
                self._attended[num_tokens:size].zero_()
        first.replay()  # the device begins while the host plans attention
        with profiled("prepare"):
            self._attention.prepare(batch)
        q, k, v = split_heads(self._heads[:num_tokens], self._model.attention_shape)
        attend = self._attention.bind(q, k, v, out=self._attended[:num_tokens])
        for layer, graph in enumerate(later):
            attend(layer)
            graph.replay()
        return chosen.hidden[:num_outputs]

    def _captured(self, inputs: PaddedInputs, splitter: _GraphSplitter) -> _Pieces:
        with torch.cuda.stream(self._stream), splitter.capture() as graphs:
            hidden = self._model.forward(inputs.inputs, splitter)
        for graph in graphs:
            graph.replay()  # the first replay takes longer than later ones
        return _Pieces(graphs, inputs, hidden)


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs of up to T tokens in up to R rows, in memory with fixed addresses. A step is padded to its graph.

    Attributes:
        inputs: ``outputs`` [R] is the last token of each row.
        slots: [G, T] int64, ``ForwardBatch.slot_mapping`` of each of G page groups.
        adapters: the tiles of tokens and of outputs, for graphs of steps with adapters.
        states: the pool of ``inputs.states``; None for a model without states.
    """

    inputs: ModelInputs
    slots: Tensor
    adapters: tuple[FixedTiles, FixedTiles] | None = None
    states: StatePool | None = None

    @classmethod
    def zeros(
        cls, model: Model, num_tokens: int, num_rows: int, device: torch.device, *, states: StatePool | None = None
    ) -> PaddedInputs:
        """Return memory for up to ``num_tokens`` T tokens in up to ``num_rows`` R rows, filled with zeros."""
        spec, num_groups = model.input_spec, max(1, len(model.attention_shape.page_windows))

        def int_zeros(*size: int) -> Tensor:
            """[*size] int64 zeros."""
            return torch.zeros(size, dtype=torch.int64, device=device)

        embeddings = None
        if spec.embeddings:
            embeddings = torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=device)
        inputs = ModelInputs(
            positions=int_zeros(num_tokens) if spec.position_axes == 1 else int_zeros(spec.position_axes, num_tokens),
            token_ids=None if spec.embeddings else int_zeros(num_tokens),
            embeddings=embeddings,
            rows=int_zeros(num_tokens) if spec.rows else None,
            outputs=int_zeros(num_rows),
            states=None if states is None else states.padded(num_tokens, num_rows),
        )
        return cls(inputs, int_zeros(num_groups, num_tokens), states=states)

    def for_graph(self, num_tokens: int, num_rows: int) -> PaddedInputs:
        """Return views for a graph of ``num_tokens`` tokens and ``num_rows`` rows."""
        inputs = self.inputs
        assert inputs.outputs is not None
        by_token = inputs.token_ids, inputs.embeddings, inputs.rows
        token_ids, embeddings, rows = (None if tensor is None else tensor[:num_tokens] for tensor in by_token)
        views = ModelInputs(
            positions=inputs.positions[..., :num_tokens],
            token_ids=token_ids,
            embeddings=embeddings,
            rows=rows,
            outputs=inputs.outputs[:num_rows],
            states=None if inputs.states is None else states_for_graph(inputs.states, num_tokens, num_rows),
            slots=self.slots[0, :num_tokens],
        )
        return PaddedInputs(views, self.slots[:, :num_tokens], states=self.states)

    def with_adapters(self, adapters: tuple[FixedTiles, FixedTiles]) -> PaddedInputs:
        """Return the same inputs for a graph of steps with adapters."""
        assert self.inputs.outputs is not None
        tokens, outputs = adapters
        fixed = FixedAdapters(tokens.for_graph(self.slots.shape[1]), outputs.for_graph(len(self.inputs.outputs)))
        return PaddedInputs(replace(self.inputs, adapters=fixed), self.slots, adapters, self.states)

    def fill(self, inputs: ModelInputs, batch: ForwardBatch, num_outputs: int) -> None:
        """Write a step that fits. num_outputs: see ``PieceGraphs.replay``.

        Padding tokens belong to no row: their slots are on the padding page; their ids, embeddings, positions and rows
        are left over from earlier steps.
        """
        num_tokens, into = len(batch.slot_mapping), self.inputs
        assert into.outputs is not None
        assert inputs.outputs is not None
        copies = [
            (into.positions[..., :num_tokens], inputs.positions),
            (into.outputs[:num_outputs], inputs.outputs[:num_outputs]),
            *(
                (target[:num_tokens], source)
                for target, source in ((into.token_ids, inputs.token_ids), (into.rows, inputs.rows))
                if target is not None and source is not None
            ),
        ]
        groups = zip(self.slots, batch.parts or (batch,), strict=True)
        copies += [(slots[:num_tokens], group.slot_mapping) for slots, group in groups]
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources)  # one kernel  # pyright: ignore[reportPrivateImportUsage]
        if into.embeddings is not None and inputs.embeddings is not None:
            into.embeddings[:num_tokens].copy_(inputs.embeddings)
        if num_tokens < self.slots.shape[1]:
            self.slots[:, num_tokens:].zero_()
        into.outputs[num_outputs:].zero_()  # leftover indices of a larger step may be out of range
        if self.states is not None:
            assert into.states is not None
            assert inputs.states is not None
            self.states.fill(into.states.rows, inputs.states.rows)
        if self.adapters is not None:
            assert isinstance(inputs.adapters, StepAdapters)
            assert inputs.adapters.output_slots is not None
            tokens, outputs = self.adapters  # padding tokens and rows use the base model
            tokens.fill(inputs.adapters.token_slots, self.slots.shape[1])
            outputs.fill(inputs.adapters.output_slots[: len(into.outputs)], len(into.outputs))
