"""CUDA graphs of decode steps: from last tokens to next tokens in one launch.

There is one graph for each row count of a ladder. A step is padded to the next row count with rows on the padding page.
The inputs of a step are copied to the device in one transfer, except for the plan of the attention backend. The graphs
share one memory pool, so the largest is captured first.

Steps in which many rows start with the same pages use separate graphs with cascade attention, which reads these pages
once. Their rows are reordered (``runner.graphs.cascade``). A row of several known tokens is expanded to several rows of
a graph (``runner.graphs.expanded_rows``).

A graph samples each row with its temperature only. If rows need more (top-k, penalties...), the step uses the hidden
states of the graph and samples outside of it.

R rows of a step, B rows of its graph, D model size, P pages of the longest row, G layer groups after the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aioengine.attention._base import CascadeAttention, DecodeBuffers, FixedCascade
from aioengine.kernels.triton.launcher import compile_only
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, SamplingKernels
from aioengine.runner.graphs.cascade import SharedPrefixes
from aioengine.runner.graphs.expanded_rows import can_expand, expand_rows
from aioengine.runner.graphs.ladder import cascade_ladder, ladder
from aioengine.runner.inputs import model_inputs
from aioengine.runner.kv_pool import PADDING_PAGE
from aioengine.runner.lora.grouping import FixedAdapters, FixedTiles
from aioengine.runner.sampling.device_sampler import fill_fields, is_simple
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import CapturableAttention, FixedDecode
    from aioengine.kernels.adapter_slots import AdapterTiles
    from aioengine.models._base import Model
    from aioengine.runner.graphs.cascade import Cascade
    from aioengine.runner.graphs.expanded_rows import ExpandedRows
    from aioengine.runner.inputs import InputBuilder, StepRows
    from aioengine.runner.rows import SampledRows

    Ints = npt.NDArray[np.int32]
    Ints64 = npt.NDArray[np.int64]

_COLUMNS = 5 + NUM_FIELDS
"""Columns of B numbers in the memory of a step: row indices, positions, slot_mapping, last_lengths, indices at which
the table stores the sampled tokens (-1: the graph does not sample the row), fields of ``Draws``.
"""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step of ``num_rows`` rows, which writes hidden [B, D] and token_ids [B].

    logits: [B, V], in memory that other graphs use too; valid until the next replay.
    """

    num_rows: int
    graph: torch.cuda.CUDAGraph
    attention: FixedDecode
    hidden: Tensor
    token_ids: Tensor
    logits: TensorAddress


class _DecodeFunction(NamedTuple):
    """A step to capture. ``compute`` returns hidden states [B, D] and logits [B, V], and writes token_ids [B]."""

    compute: Callable[[], tuple[Tensor, Tensor]]
    token_ids: Tensor


class TensorAddress:
    """The address of a tensor [...] in the pool of CUDA graphs, without a reference to its memory.

    A reference would keep separate memory for the logits of each graph. Without it, the graphs share this memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        """tensor: [...] on the device."""
        self._dtype = tensor.dtype
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.dtype.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * tensor.dtype.itemsize for stride in tensor.stride()),
            "version": 2,
        }

    def tensor(self, device: torch.device) -> Tensor:
        """Return a tensor [...] at this address, with its current content."""
        return torch.as_tensor(self, device=device).view(self._dtype)


@dataclass(slots=True)
class _CascadeGraph:
    """A graph for rows that share pages, and the cascade for which it was last planned."""

    graph: _Graph
    attention: FixedCascade
    planned: Cascade | None = None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The results of a replayed step.

    Attributes:
        token_ids: [R] int64, already stored in the table; None: a row needs more than a temperature, or was expanded.
        hidden: [R, D].
        graph: the graph, for ``DecodeGraphs.logits``.
        order: [R] int64, the row of the graph of each row; None: they are in order.
        last_indices: the same on the host for expanded rows; None: rows were not expanded.
        needs_masks: rows need only grammar masks beside a temperature, and nothing else reads the logits. So masks may
            be applied to the logits in place, and ``DecodeGraphs.draw`` samples the tokens.
    """

    token_ids: Tensor | None
    hidden: Tensor
    graph: _Graph
    order: Tensor | None
    needs_masks: bool = False
    last_indices: list[int] | None = None


class _GroupMemory:
    """KV slots of a step, then page ids, for each layer group after the first. The groups share all other inputs."""

    def __init__(self, num_groups: int, capacity: int, device: torch.device) -> None:
        self._memory = torch.zeros(num_groups, capacity, dtype=torch.int32, device=device)
        self._host = torch.zeros(num_groups, capacity, dtype=torch.int32, pin_memory=True)
        self._num_used = 0

    def buffers(self, size: int, first: DecodeBuffers) -> list[DecodeBuffers]:
        """Return the buffers of all groups for a graph of ``size`` rows. first: the buffers of the first group."""
        return [first, *(replace(first, slot_mapping=row[:size], page_ids=row[size:]) for row in self._memory)]

    def fill(self, size: int, slots_GR: Ints, page_ids: list[Ints]) -> None:
        """Write a step for a graph of ``size`` rows: slots_GR [G, R], and the page ids [X] of each group."""
        num_rows = slots_GR.shape[1]
        self._num_used = size + len(page_ids[0]) + size - num_rows
        for host, slots, ids in zip(self._host.numpy(), slots_GR, page_ids, strict=True):
            host[:num_rows] = slots
            host[num_rows:size] = 0
            host[size : size + len(ids)] = ids
            host[size + len(ids) : self._num_used] = PADDING_PAGE

    def copy(self) -> None:
        """Queue the copy of the step to the device."""
        for memory, host in zip(self._memory, self._host, strict=True):
            memory[: self._num_used].copy_(host[: self._num_used], non_blocking=True)

    def clear(self) -> None:
        self._memory.zero_()


def _fill_draws(
    columns: Ints, rows: StepRows, sampled: SampledRows, order: Ints64 | slice, *, is_expanded: bool, is_drawn: bool
) -> None:
    """Write ``columns`` [1 + NUM_FIELDS, B], the last of ``_COLUMNS``: the indices at which the table stores the
    sampled tokens, and the fields of ``Draws``. order: [R] the row of the step of each row of the graph.
    """
    num_rows = int(rows.token_ends[-1])
    columns[0] = -1
    if is_expanded:
        columns[0, rows.token_ends - 1] = rows.row_indices
    elif is_drawn:
        columns[0, :num_rows] = rows.row_indices[order]
    fill_fields(sampled, columns[1:, : len(rows.requests)])
    if not isinstance(order, slice):
        columns[1:, :num_rows] = columns[1:, order]


def _fill_pages(
    out: Ints, size: int, page_table_RP: Ints, last_pages: Ints64, *, num_shared: Ints64 | None
) -> tuple[int, npt.NDArray[np.bool_]]:
    """Write the starts of the page ids of ``size`` rows, then the page ids, to out [X]. Padding rows use the padding
    page.

    last_pages: [R] column of page_table_RP [R, P] with the last page of each row. num_shared: [R] number of first pages
    handled by a cascade; None: there is no cascade. Returns the number of integers written, and a mask [R, P] of the
    used entries of the table.
    """
    num_rows = len(last_pages)
    starts = out[: size + 1]
    starts[0] = 0
    columns = np.arange(page_table_RP.shape[1])
    is_used_RP = columns <= last_pages[:, None]
    counts = last_pages + 1
    if num_shared is not None:
        is_used_RP &= columns >= num_shared[:, None]
        counts -= num_shared
    np.cumsum(counts, out=starts[1 : num_rows + 1])
    num_used = int(starts[num_rows])
    starts[num_rows + 1 :] = np.arange(num_used + 1, num_used + 1 + size - num_rows)
    ids = out[size + 1 : size + 1 + num_used + size - num_rows]
    ids[:num_used] = page_table_RP[is_used_RP]
    ids[num_used:] = PADDING_PAGE
    return size + 1 + len(ids), is_used_RP


class DecodeGraphs:
    """The decode graphs of a model, for one table of requests."""

    def __init__(self, model: Model, attention: CapturableAttention, inputs: InputBuilder, vocab_size: int) -> None:
        """inputs: builds the inputs of steps without graphs; its table, page size and states are used here too."""
        table = inputs.table
        self._states = inputs.states
        self._model = model
        self._attention = attention
        self._table = table
        self._vocab_size = vocab_size
        self._page_size = inputs.page_size
        self._last_tokens = table.last_tokens
        self._device = table.last_tokens.device
        self._graphs: dict[int, _Graph] = {}
        self._sizes = np.zeros(0, dtype=np.int64)
        self._cascade_graphs: list[_CascadeGraph] = []
        self._graphs_with_adapters: dict[int, _Graph] = {}
        self._tiles: FixedTiles | None = None
        self._prefixes: SharedPrefixes | None = None
        self._copied = torch.cuda.Event()
        self._kernels: SamplingKernels | None = None  # the graphs write to its memory
        self._memory = torch.empty(0, dtype=torch.int32, device=self._device)
        self._host = torch.empty(0, dtype=torch.int32)
        self._groups: _GroupMemory | None = None

    @property
    def sizes(self) -> list[int]:
        """The row counts of the graphs, ascending."""
        return self._sizes.tolist()

    @property
    def max_rows(self) -> int:
        return int(self._sizes[-1]) if self._sizes.size else 0

    def capture(self, max_rows: int, report: Callable[[int, int], None]) -> None:
        """Capture the ladder up to ``max_rows``. report: called with the numbers of captured and of all graphs."""
        sizes = ladder(max_rows)
        capacity = _COLUMNS * max_rows + max_rows + 1 + max_rows * self._table.page_table.shape[1]
        self._memory = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=True)
        num_groups, _, max_pages = self._table.page_tables.tables.shape
        if num_groups > 1:
            self._groups = _GroupMemory(num_groups - 1, max_rows * (max_pages + 1), self._device)
        kernels = SamplingKernels(max_rows=max_rows, vocab_size=self._vocab_size, device=self._device)
        self._kernels = kernels
        pool = torch.cuda.graph_pool_handle()
        attention = self._attention
        cascade_sizes: list[int] = []
        if isinstance(attention, CascadeAttention):
            cascade_sizes = cascade_ladder(max_rows, min_rows=attention.cascade_limits.min_rows)
            self._prefixes = SharedPrefixes(self._table, attention.cascade_limits, page_size=self._page_size)
        rows = {size: attention.fixed_decode(size, self._buffers(size)) for size in reversed(sizes)}
        cascades: dict[int, FixedCascade] = {}
        if isinstance(attention, CascadeAttention):
            cascades = {size: attention.fixed_cascade(size, self._buffers(size)) for size in reversed(cascade_sizes)}
        if self._table.adapters.tiles is not None:
            self._tiles = FixedTiles(max_rows, self._table.adapters.tiles, self._device)
        self._compile_kernels([*rows.items(), *cascades.items()], kernels)
        num_graphs = len(rows) + len(cascades)
        if self._tiles is not None:
            for size, fixed in rows.items():
                tiles = self._tiles.of(size)
                self._graphs_with_adapters[size] = self._captured(size, fixed, kernels, pool, tiles=tiles)
        report(0, num_graphs)
        for size, fixed in rows.items():
            self._graphs[size] = self._captured(size, fixed, kernels, pool)
            report(len(self._graphs), num_graphs)
        for size, fixed in cascades.items():
            self._cascade_graphs.insert(0, _CascadeGraph(self._captured(size, fixed, kernels, pool), fixed))
            report(len(rows) + len(self._cascade_graphs), num_graphs)
        self._sizes = np.array(sizes)

    def padded(self, num_rows: int) -> int:
        """Return the row count of the smallest graph for ``num_rows`` rows, or ``num_rows`` if no graph is large
        enough.
        """
        return num_rows if num_rows > self.max_rows else int(self._sizes[np.searchsorted(self._sizes, num_rows)])

    def fits(self, rows: StepRows) -> bool:
        """Return whether these rows are a decode step with a graph."""
        num_rows = len(rows.requests)
        if not num_rows or num_rows > self.max_rows:
            return False
        num_tokens = int(rows.token_ends[-1])
        if rows.known_ids.size:
            spec = self._model.input_spec
            is_small = num_tokens <= self.max_rows and not spec.rows and not spec.states
            return is_small and bool(self._table.num_with_grammar) and can_expand(rows)
        return num_tokens == num_rows and bool(rows.samples.all())

    def replay(self, rows: StepRows, sampled: SampledRows, *, when_ready: Callable[[], None]) -> DecodeStep:
        """Queue the step, which must fit. when_ready: called before its inputs overwrite those of the previous step."""
        num_rows = int(rows.token_ends[-1])
        with part("prepare"):
            expanded = expand_rows(rows, self._table) if rows.known_ids.size else None
            slots = self._table.adapters.slots(rows.row_indices)
            if slots is not None and expanded is not None:
                slots = slots[expanded.row_of_token]
            can_share = self._prefixes is not None and expanded is None and slots is None
            cascade = self._prefixes.find(rows) if self._prefixes and can_share else None
            chosen = self._choose(num_rows, cascade, slots)
            size = chosen.num_rows
            self._copied.synchronize()
            is_drawn = is_simple(sampled) and expanded is None
            host = self._host.numpy()
            num_used = self._fill(host, size, rows, sampled, cascade=cascade, expanded=expanded, is_drawn=is_drawn)
            ends = _COLUMNS * size
            chosen.attention.plan(self._host[ends : ends + size + 1], self._host[3 * size : 4 * size])
        when_ready()
        self._memory[:num_used].copy_(self._host[:num_used], non_blocking=True)
        if self._groups is not None:
            self._groups.copy()
        self._copied.record()
        chosen.graph.replay()
        token_ids = chosen.token_ids[:num_rows] if is_drawn else None
        needs_masks = not is_drawn and cascade is None and self._may_be_masked(sampled)
        if expanded is not None:
            order, last_indices = expanded.last_indices, (rows.token_ends - 1).tolist()
            return DecodeStep(None, chosen.hidden[order], chosen, order, needs_masks, last_indices)
        if cascade is None:
            return DecodeStep(token_ids, chosen.hidden[:num_rows], chosen, None, needs_masks)
        inverse = cascade.inverse
        return DecodeStep(None if token_ids is None else token_ids[inverse], chosen.hidden[inverse], chosen, inverse)

    def _may_be_masked(self, sampled: SampledRows) -> bool:
        table = self._table
        has_readers = table.num_with_logprobs or table.num_with_states
        return not has_readers and is_simple(sampled, aside_from=table.mask_bit)

    def draw(self, step: DecodeStep, logits: Tensor) -> Tensor:
        """Sample token ids [R] by temperature from masked logits [>= R, V], and store them in the table. ``step`` must
        be the step that was replayed last.
        """
        assert self._kernels is not None, "no graph was captured"
        num_rows = step.last_indices[-1] + 1 if step.last_indices else len(step.hidden)
        columns = self._columns(step.graph.num_rows)[:, :num_rows]
        token_ids = step.graph.token_ids[:num_rows]
        row_indices = columns[4] if step.last_indices else columns[0]
        self._kernels.sample(logits[:num_rows], Draws(columns[5:]), token_ids, (row_indices, self._last_tokens))
        return token_ids if step.order is None else token_ids[step.order]

    def logits(self, step: DecodeStep) -> Tensor:
        """Return the logits [>= R, V] of the last replayed step, by rows of its graph (``DecodeStep.order``)."""
        return step.graph.logits.tensor(self._device)

    def _choose(self, num_rows: int, cascade: Cascade | None, slots: Ints | None) -> _Graph:
        """Return the graph for a step. slots: [rows of the graph] adapter slots; None: all rows use the base model."""
        if slots is not None:
            assert self._tiles is not None, "no graph has adapters"
            chosen = self._graphs_with_adapters[self.padded(num_rows)]
            self._tiles.fill(slots, chosen.num_rows)
            return chosen
        if cascade is None:
            return self._graphs[self.padded(num_rows)]
        shared = next(candidate for candidate in self._cascade_graphs if candidate.graph.num_rows >= num_rows)
        if shared.planned is not cascade:
            shared.attention.plan_shared(cascade.pages)
            shared.planned = cascade
        return shared.graph

    def _fill(
        self,
        host: Ints,
        size: int,
        rows: StepRows,
        sampled: SampledRows,
        *,
        cascade: Cascade | None,
        expanded: ExpandedRows | None = None,
        is_drawn: bool,
    ) -> int:
        """Write the inputs of the graph of ``size`` rows to ``host`` [X]. Return the number of integers written."""
        page_size, ends = self._page_size, _COLUMNS * size
        order = cascade.order if cascade else expanded.row_of_token if expanded else slice(None)
        row_indices = rows.row_indices[order]
        positions = expanded.positions if expanded else rows.starts[order]
        last_pages = positions // page_size
        last_lengths = positions - last_pages * page_size + 1
        tables_GRP = self._table.page_tables.of_step(row_indices, positions, int(last_pages.max()) + 1)
        num_rows = len(positions)
        columns = host[:ends].reshape(_COLUMNS, size)
        columns[0, :num_rows] = expanded.sources if expanded else row_indices
        columns[1, :num_rows] = rows.shifted(positions, self._model.input_spec.short_length, order)
        if (images := self._table.images) is not None:
            columns[1, :num_rows] += images.deltas[row_indices]
        columns[2, :num_rows] = tables_GRP[0][np.arange(num_rows), last_pages] * page_size + last_lengths - 1
        columns[3, :num_rows] = last_lengths
        _fill_draws(columns[4:], rows, sampled, order, is_expanded=expanded is not None, is_drawn=is_drawn)
        if num_rows < size:
            columns[:3, num_rows:] = 0
            columns[3, num_rows:] = 1
            columns[5:, num_rows:] = 0
        num_shared = cascade.num_shared if cascade else None
        num_used, is_used_RP = _fill_pages(host[ends:], size, tables_GRP[0], last_pages, num_shared=num_shared)
        if self._groups is not None:
            slots_GR = tables_GRP[1:, np.arange(num_rows), last_pages] * page_size + last_lengths - 1
            self._groups.fill(size, slots_GR, [table_RP[is_used_RP] for table_RP in tables_GRP[1:]])
        return ends + num_used

    def _columns(self, size: int) -> Tensor:
        """Return the columns [_COLUMNS, size] in the memory of a step."""
        return self._memory[: _COLUMNS * size].view(_COLUMNS, size)

    def _buffers(self, size: int) -> DecodeBuffers:
        columns, first = self._columns(size), _COLUMNS * size + size + 1
        buffers = DecodeBuffers(
            slot_mapping=columns[2],
            starts=self._memory[_COLUMNS * size : first],
            last_lengths=columns[3],
            page_ids=self._memory[first:],
            max_pages=self._table.page_table.shape[1],
        )
        return buffers if self._groups is None else replace(buffers, parts=self._groups.buffers(size, buffers))

    def _compile_kernels(self, steps: list[tuple[int, FixedDecode]], kernels: SamplingKernels) -> None:
        """Compile the kernels of all steps in parallel, before the first capture."""
        with compile_only():
            for size, attention in steps:
                self._step(size, attention, kernels).compute()
            if self._tiles is not None:
                largest = steps[0][0]
                for size, attention in steps:
                    if size in (1, 2, largest):  # these use all adapter kernels
                        self._step(size, attention, kernels, self._tiles.of(size)).compute()

    def _step(
        self, size: int, attention: FixedDecode, kernels: SamplingKernels, tiles: AdapterTiles | None = None
    ) -> _DecodeFunction:
        columns = self._columns(size)
        self._memory.zero_()
        if self._groups is not None:
            self._groups.clear()
        attention.plan_first(np.ones(size, dtype=np.int32))
        stored = columns[4], self._last_tokens
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.arange(size, device=self._device) if self._model.input_spec.rows else None
        adapters = None if tiles is None else FixedAdapters(tiles, tiles)

        def compute() -> tuple[Tensor, Tensor]:
            """Return hidden states [B, D] and logits [B, V], and write ``token_ids`` [B]."""
            last_tokens = self._last_tokens.index_select(0, columns[0])
            inputs = model_inputs(self._model, last_tokens, columns[1], rows=rows, adapters=adapters)
            if self._states is not None:  # padding rows write to the padding page
                states = self._states.of_graph(columns[0], columns[1], columns[2] < self._page_size)
                inputs = replace(inputs, states=states)
            hidden = self._model.forward(inputs, attention)
            logits = self._model.compute_logits(hidden)
            kernels.sample(logits, Draws(columns[5:]), token_ids, stored)
            return hidden, logits

        return _DecodeFunction(compute, token_ids)

    def _captured(
        self,
        size: int,
        attention: FixedDecode,
        kernels: SamplingKernels,
        pool: torch.cuda._POOL_HANDLE,
        *,
        tiles: AdapterTiles | None = None,
    ) -> _Graph:
        """Capture a step. tiles: the adapter tiles of a graph for steps with adapters."""
        step = self._step(size, attention, kernels, tiles)
        step.compute()  # kernels must not be loaded or chosen during the capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden, logits = step.compute()
        return _Graph(size, graph, attention, hidden, step.token_ids, TensorAddress(logits))
