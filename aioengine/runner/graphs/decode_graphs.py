"""CUDA graphs of decode steps: from last tokens to next tokens in one launch.

There is one graph for each row count of a ladder. A step is padded to the next row count with rows on the padding page.
The inputs of a step are copied to the device in one transfer, except for the plan of the attention backend. The graphs
share one memory pool, so the largest is captured first.

Steps in which many rows start with the same pages use separate graphs with cascade attention, which reads these pages
once. Their rows are reordered, and a row of several known tokens is expanded to several rows of a graph
(``runner.graphs.rearranged_rows``). These may share a page table, so that attention reads it once.

If the positions of a step are upper bounds, its graph first subtracts the rejected drafts (``speculation.proposer``).

A graph samples each row with its temperature only. If rows need more (top-k, penalties...), the step uses the hidden
states of the graph and samples outside of it.

With several ranks, each computes the logits of its part of the vocabulary, and the ranks sample together.

R rows of a step, B rows of its graph, D model size, W tokens of a rank, P pages of the longest row, G page groups after
the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.attention._base import CapturableAttention, CascadeAttention, DecodeBuffers, FixedCascade, FixedDecode
from aioengine.kernels.adapter_types import AdapterTiles
from aioengine.kernels.triton.drafts import accept, move_rows
from aioengine.kernels.triton.launcher import compile_only
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, SamplingKernels
from aioengine.layers.ranks import RankGroup
from aioengine.models._base import Model
from aioengine.models._features import Features
from aioengine.runner.graphs.ladder import cascade_ladder, ladder
from aioengine.runner.graphs.rearranged_rows import Cascade, SharedPrefixes, TokenRows, can_expand, expand_rows
from aioengine.runner.inputs import InputBuilder, StepRows, model_inputs
from aioengine.runner.kv_pool import PADDING_PAGE
from aioengine.runner.lora.pool import FixedAdapters, FixedTiles
from aioengine.runner.request_row import SampledRows, needs_only_temperature
from aioengine.runner.sampling.device_sampler import fill_fields
from aioengine.runner.timing import profiled
from aioengine.scheduler.plan import Row

Ints = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]

_SOURCES, _POSITIONS, _SLOTS, _LAST_LENGTHS, _TARGETS, _FIELDS = range(6)
_TABLES, _REJECTED = _FIELDS + NUM_FIELDS, _FIELDS + NUM_FIELDS + 1
"""Columns of B numbers in the memory of a step. Sources, targets: indices in ``RowTable.last_tokens`` of the token of a
row, and of the token that is sampled after it (-1: the graph does not sample the row). Last lengths: see
``DecodeBuffers``. Fields: of ``Draws``. Tables, rejected: the number of the page table, and the index in
``RowTable.rejected``, see ``move_rows``.
"""
_SAMPLED = _FIELDS + 2
"""The column, among the fields, with the positions of the sampled tokens."""
_COLUMNS = _REJECTED + 1


@dataclass(slots=True)
class _Graph:
    """A captured step of ``num_rows`` rows, which writes hidden [B, D] and token_ids [B].

    Attributes:
        logits: [B, W] of this rank, in memory that other graphs use too; valid until the next replay.
        cascade_attention: ``attention`` of a graph with cascade attention, else None.
        planned: the cascade for which the graph was last planned.
    """

    num_rows: int
    graph: torch.cuda.CUDAGraph
    attention: FixedDecode
    hidden: Tensor
    token_ids: Tensor
    logits: TensorAddress
    cascade_attention: FixedCascade | None = None
    planned: Cascade | None = None


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


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The results of a replayed step.

    R: rows of the step, or its tokens (``DecodeGraphs.replay_with_drafts``).

    Attributes:
        token_ids: [R] int64; None: a row needs more than a temperature. They are stored in the table already, except
            for a step with drafts.
        hidden: [R, D].
        graph: the graph, for ``DecodeGraphs.logits``.
        order: [R] int64, the index in the graph of each row; None: rows are in order.
        masked: the indices in the graph of the rows, if they need only grammar masks besides a temperature, and nothing
            else reads the logits; else None. Masks may then be applied to the logits in place, and
            ``DecodeGraphs.draw`` samples the tokens.
    """

    token_ids: Tensor | None
    hidden: Tensor
    graph: _Graph
    order: Tensor | None
    masked: list[int] | None = None


def _results(graph: _Graph, index: Tensor | slice, *, is_sampled: bool, masked: list[int] | None = None) -> DecodeStep:
    """Return the results of a replayed graph. index: [R] its rows with results. is_sampled: it sampled the tokens."""
    token_ids = graph.token_ids[index] if is_sampled else None
    return DecodeStep(token_ids, graph.hidden[index], graph, None if isinstance(index, slice) else index, masked)


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
    """The decode graphs of a model, for one table of requests.

    Attributes:
        max_rows: maximum rows of a graph. sizes: the row counts of the graphs, ascending.
    """

    def __init__(
        self,
        model: Model,
        attention: CapturableAttention,
        inputs: InputBuilder,
        *,
        vocab_size: int,
        max_rows: int,
        is_draft_model: bool = False,
        features: Features | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """inputs: builds the inputs of steps without graphs; its table, page size and states are used here too.
        is_draft_model: the steps are those of ``replay_draft``. features: of a draft head.
        ranks: all ranks replay the same graphs, but only rank 0 knows the grammars and accepts drafts.
        """
        self._has_ranks = ranks is not None
        self._is_draft_model = is_draft_model
        table = inputs.table
        device = table.last_tokens.device
        self.max_rows = max_rows
        self.sizes = ladder(max_rows)
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._table = table
        self._device = device
        # The memory of a step. First: columns, starts of page ids, page ids. For each further page group: slots, page
        # ids. The groups share all other inputs.
        num_groups, _, max_pages = table.page_tables.tables.shape
        capacity = _COLUMNS * max_rows + max_rows + 1 + max_rows * max_pages
        host = torch.zeros(num_groups, capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._memory = [*torch.zeros(num_groups, capacity, dtype=torch.int32, device=device)]
        self._host = [*host]
        self._host_arrays: list[Ints] = [*host.numpy()]
        self._copied = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)  # of captures
        self._samples = ranks is None or ranks.sampling is not None
        self._kernels = SamplingKernels(
            max_rows=max_rows,
            vocab_size=vocab_size,
            num_embeddings=model.vocab_size,
            device=device,
            num_parts=1 if ranks is None else ranks.size,
            ranks=None if ranks is None else ranks.sampling,
        )
        self._graphs: dict[int, _Graph] = {}
        self._graphs_with_adapters: dict[int, _Graph] = {}
        self._cascade_graphs: list[_Graph] = []  # ascending
        tiles = table.adapters.tiles
        self._tiles = None if tiles is None else FixedTiles(max_rows, tiles, device)
        self._features = features
        self._lag = int(features is not None)  # 1: a draft head, whose position p reads the token at position p + 1
        if features is not None:  # the hidden states of the head after its newest draft, by row index
            self._states = torch.zeros(len(table.sampling) + 1, model.hidden_size, dtype=model.dtype, device=device)
        self._prefixes: SharedPrefixes | None = None
        if not is_draft_model and isinstance(attention, CascadeAttention):
            self._prefixes = SharedPrefixes(table, attention.cascade_limits, page_size=self._inputs.page_size)

    def capture(self, report: Callable[[int, int], None]) -> None:
        """Capture all graphs. report: called with the numbers of captured and of all graphs."""
        attention, tiles, short = self._attention, self._tiles, self._shortened()
        rows = {size: attention.fixed_decode(size, self._buffers(size)) for size in reversed(self.sizes)}
        cascades: dict[int, FixedCascade] = {}
        if self._prefixes is not None and isinstance(attention, CascadeAttention):
            cascade_sizes = cascade_ladder(self.max_rows, min_rows=attention.cascade_limits.min_rows)
            cascades = {size: attention.fixed_cascade(size, self._buffers(size)) for size in reversed(cascade_sizes)}
        with compile_only():  # compile the kernels of all steps in parallel
            if self._table.max_drafts:
                ids = torch.zeros(5, 1, dtype=torch.int64, device=self._device)
                accept(ids, ids[0], self._memory[0], self._table.last_tokens, self._table.rejected)
            for size, fixed in [*rows.items(), *cascades.items()]:
                self._step(short, size, fixed)()
                if tiles is not None and size in (1, 2, self.max_rows):  # these use all adapter kernels
                    self._step(short, size, fixed, tiles.for_graph(size))()
        pool = torch.cuda.graph_pool_handle()
        num_graphs = len(rows) + len(cascades)
        if tiles is not None:
            for size, fixed in rows.items():
                self._graphs_with_adapters[size] = self._captured(size, fixed, pool, tiles.for_graph(size))
        report(0, num_graphs)
        for size, fixed in rows.items():
            self._graphs[size] = self._captured(size, fixed, pool)
            report(len(self._graphs), num_graphs)
        for size, shared in cascades.items():
            graph = self._captured(size, shared, pool)
            graph.cascade_attention = shared
            self._cascade_graphs.insert(0, graph)
            report(len(rows) + len(self._cascade_graphs), num_graphs)

    def padded(self, num_rows: int) -> int:
        """Return the row count of the smallest graph for ``num_rows`` rows, or ``num_rows`` if no graph is large
        enough.
        """
        return num_rows if num_rows > self.max_rows else self.sizes[bisect_left(self.sizes, num_rows)]

    def fits(self, rows: StepRows, *, has_drafts: bool = False) -> bool:
        """Return whether these rows are a decode step with a graph. has_drafts: known tokens are drafts."""
        num_rows = len(rows.requests)
        if not num_rows or num_rows > self.max_rows:
            return False
        num_tokens = int(rows.token_ends[-1])
        if rows.known_ids.size:
            spec = self._model.input_spec
            is_small = num_tokens <= self.max_rows and not spec.rows and not spec.states
            may_expand = has_drafts or bool(self._table.num_with_grammar)
            return is_small and may_expand and not self._has_ranks and can_expand(rows)
        return num_tokens == num_rows and bool(rows.samples.all())

    def may_overlap(self, rows: list[Row]) -> bool:
        """Return whether graphs can compute and sample these rows before the host knows their positions."""
        table = self._table
        if not table.has_upper_bounds or table.num_with_logprobs or table.num_with_hidden_states:
            return False
        if any(row.token_ids or row.count > 1 + row.num_drafts for row in rows):
            return False
        row_indices = [table.requests[row.uid].row_index for row in rows]
        return sum(row.count for row in rows) <= self.max_rows and needs_only_temperature(table.sampling[row_indices])

    def replay(
        self, rows: StepRows, sampled: SampledRows, *, when_ready: Callable[[], None] | None = None
    ) -> DecodeStep:
        """Queue a step, which must fit. Its graph samples the next token of each row.

        when_ready: called before its inputs overwrite those of the previous step.
        """
        table, is_sampled = self._table, needs_only_temperature(sampled.records)
        has_readers = table.num_with_logprobs or table.num_with_hidden_states or self._has_ranks
        needs_masks = not (is_sampled or has_readers) and needs_only_temperature(
            sampled.records, aside_from=table.mask_bit
        )
        with profiled("prepare"):
            if rows.known_ids.size:
                tokens = expand_rows(rows, table)
                if is_sampled or needs_masks:  # otherwise the sampler still needs the previous tokens, for penalties
                    tokens.targets[rows.token_ends - 1] = rows.row_indices
            else:
                tokens = self._one_token_rows(rows, is_sampled=is_sampled)
        graph = self._run(rows, sampled, tokens, when_ready)
        if tokens.cascade is not None:
            return _results(graph, tokens.cascade.inverse, is_sampled=is_sampled)
        lasts = rows.token_ends - 1
        index = table.upload(lasts) if rows.known_ids.size else slice(len(lasts))
        return _results(graph, index, is_sampled=is_sampled, masked=lasts.tolist() if needs_masks else None)

    def replay_with_drafts(self, rows: StepRows, sampled: SampledRows, num_drafts: Ints64 | None) -> DecodeStep:
        """Queue a step with drafts, which must fit. Its graph samples after each token; ``accept`` stores the tokens.

        num_drafts: as in ``expand_rows``. Returns results for tokens instead of rows.
        """
        is_sampled = needs_only_temperature(sampled.records)
        with profiled("prepare"):
            tokens = expand_rows(rows, self._table, num_drafts)
            if is_sampled:  # a graph samples only after tokens with a target; this target is never read
                tokens.targets[:] = len(self._table.last_tokens) - 1
        graph = self._run(rows, sampled, tokens)
        return _results(graph, slice(len(tokens.positions)), is_sampled=is_sampled)

    def replay_draft(self, rows: StepRows, sampled: SampledRows, number: int, num_unknown: Ints64 | None) -> DecodeStep:
        """Queue a step of a draft model, which must fit. Its graph samples the draft with this number of each row.

        Rows without known tokens read the drafts with the previous number. num_unknown: as in ``expand_rows``.
        """
        table, lasts = self._table, rows.token_ends - 1
        index: Tensor | slice = slice(len(lasts))
        targets = table.draft_indices(number, rows.row_indices)
        with profiled("prepare"):
            if not rows.known_ids.size:
                sources = table.draft_indices(number - 1, rows.row_indices)
                tokens = TokenRows(slice(None), rows.starts, sources, targets)
            else:
                tokens = expand_rows(rows, table, num_unknown=num_unknown)
                index = table.upload(lasts)
                if num_unknown is None:
                    tokens.targets[lasts] = targets
                else:  # ``move_rows`` chooses the token of each row after which a draft is sampled
                    tokens.targets[:] = targets[tokens.row_of_token]
                    index -= table.rejected[table.upload(rows.row_indices)]
        return _results(self._run(rows, sampled, tokens), index, is_sampled=needs_only_temperature(sampled.records))

    def _one_token_rows(self, rows: StepRows, *, is_sampled: bool) -> TokenRows:
        """Return rows of one token each, with cascade attention if it saves enough. is_sampled: the graph samples."""
        table, cascade = self._table, None
        is_exact = not table.is_upper_bound.any()
        if self._prefixes is not None and is_exact and table.adapters.slots(rows.row_indices) is None:
            cascade = self._prefixes.find(rows)
        order = slice(None) if cascade is None else cascade.order
        row_indices = rows.row_indices[order]
        targets = row_indices if is_sampled else np.full(len(row_indices), -1)
        return TokenRows(order, rows.starts[order], row_indices, targets, cascade)

    def _run(
        self, rows: StepRows, sampled: SampledRows, tokens: TokenRows, when_ready: Callable[[], None] | None = None
    ) -> _Graph:
        """Choose the graph of a step, write its inputs, and queue it."""
        with profiled("prepare"):
            num_tokens = len(tokens.positions)
            slots = self._table.adapters.slots(rows.row_indices[tokens.row_of_token])
            chosen = self._choose(num_tokens, tokens.cascade, slots)
            size = chosen.num_rows
            self._copied.synchronize()
            tables: Ints | None = None
            if num_tokens > len(rows.requests) and (most := chosen.attention.most_tokens) > 1:
                is_first = (tokens.positions - rows.starts[tokens.row_of_token]) % most == 0
                tables = np.append(np.flatnonzero(is_first), np.arange(num_tokens, size + 1)).astype(np.int32)
            num_used = self._fill(size, rows, sampled, tokens, tables)
            host, ends = self._host[0], _COLUMNS * size
            chosen.attention.plan(host[ends : ends + size + 1], host[_LAST_LENGTHS * size :][:size], tables)
        if when_ready is not None:
            when_ready()
        for memory, host, end in zip(self._memory, self._host, num_used, strict=True):
            inputs = self._table.upload(host[:end].numpy()) if self._is_draft_model else host[:end]
            memory[:end].copy_(inputs, non_blocking=True)
        if not self._is_draft_model:  # the host does not wait for these copies before it prepares the next draft
            self._copied.record()
        chosen.graph.replay()
        return chosen

    def draw(self, step: DecodeStep, logits: Tensor) -> Tensor:
        """Sample token ids [R] by temperature from masked logits [>= R, V], and store them in the table. ``step`` must
        be the step that was replayed last.
        """
        num_rows = step.masked[-1] + 1 if step.masked else len(step.hidden)
        columns = self._columns(step.graph.num_rows)[:, :num_rows]
        token_ids = step.graph.token_ids[:num_rows]
        targets = columns[_SOURCES if step.order is None else _TARGETS]
        self._kernels.sample(logits[:num_rows], Draws(columns[_FIELDS:]), token_ids, (targets, self._table.last_tokens))
        return token_ids if step.order is None else token_ids[step.order]

    def accept(self, step: DecodeStep, token_ids: Tensor, spans: Tensor) -> None:
        """Accept drafts by the tokens [T] sampled after each token of the last replayed step. spans: see ``accept``."""
        sources = self._columns(step.graph.num_rows)[_SOURCES]
        accept(spans, token_ids, sources, self._table.last_tokens, self._table.rejected)

    def logits(self, step: DecodeStep) -> Tensor:
        """Return the logits [>= R, V] of the last replayed step, by rows of its graph (``DecodeStep.order``). All ranks
        call it together.
        """
        return self._model.gather_logits(step.graph.logits.tensor(self._device))

    def _choose(self, num_rows: int, cascade: Cascade | None, slots: Ints | None) -> _Graph:
        """Return the graph for a step. slots: [rows of the graph] adapter slots; None: all rows use the base model."""
        if slots is not None:
            assert self._tiles is not None, "no graph has adapters"
            chosen = self._graphs_with_adapters[self.padded(num_rows)]
            self._tiles.fill(slots, chosen.num_rows)
            return chosen
        if cascade is None:
            return self._graphs[self.padded(num_rows)]
        chosen = next(candidate for candidate in self._cascade_graphs if candidate.num_rows >= num_rows)
        if chosen.planned is not cascade:
            assert chosen.cascade_attention is not None
            chosen.cascade_attention.plan_shared(cascade.pages)
            chosen.planned = cascade
        return chosen

    def _fill(
        self, size: int, rows: StepRows, sampled: SampledRows, tokens: TokenRows, tables: Ints | None = None
    ) -> list[int]:
        """Write the inputs of the graph of ``size`` rows to the host memory. Return the number of integers written for
        each page group.

        tables: [X + 1], see ``FixedDecode.plan``.
        """
        hosts, page_size, ends = self._host_arrays, self._inputs.page_size, _COLUMNS * size
        row_of_token, positions, cascade = tokens.row_of_token, tokens.positions, tokens.cascade
        row_indices = rows.row_indices[row_of_token]
        num_rows = len(positions)
        table_of_row, lasts = np.arange(num_rows), slice(None)  # lasts: the last row of each page table
        if tables is not None:
            firsts = tables[tables < num_rows]
            lasts = np.append(firsts[1:], num_rows) - 1
            table_of_row = np.searchsorted(firsts, table_of_row, side="right") - 1
        last_positions = positions[lasts]
        last_pages = last_positions // page_size
        tables_GRP = self._table.page_tables.of_step(row_indices[lasts], last_positions, int(last_pages.max()) + 1)
        pages = positions // page_size
        slots_GR = (tables_GRP[:, table_of_row, pages] - pages) * page_size + positions
        columns = hosts[0][:ends].reshape(_COLUMNS, size)
        columns[_SOURCES, :num_rows], columns[_TARGETS, :num_rows] = tokens.sources, tokens.targets
        columns[_POSITIONS, :num_rows] = rows.shifted(positions, self._model.input_spec.short_length, row_of_token)
        if (images := self._table.images) is not None:
            columns[_POSITIONS, :num_rows] += images.deltas[row_indices]
        columns[_SLOTS, :num_rows] = slots_GR[0]
        columns[_LAST_LENGTHS, :num_rows] = positions + 1 - last_pages[table_of_row] * page_size
        columns[_TABLES, :num_rows] = table_of_row
        is_upper_bound, none_rejected = self._table.is_upper_bound[row_indices], len(self._table.is_upper_bound)
        rejected = np.where(is_upper_bound, row_indices, none_rejected)
        columns[_REJECTED, :num_rows] = -1 - rejected if tokens.is_exact else rejected
        fields = columns[_FIELDS:_TABLES]
        fill_fields(sampled, fields[:, : len(rows.requests)])
        if not isinstance(row_of_token, slice):
            fields[:, :num_rows] = fields[:, row_of_token]
        if not tokens.is_exact:  # otherwise ``move_rows`` compares it with the positions
            columns[_SAMPLED, :num_rows] = positions + 1 + self._lag
        if num_rows < size:
            columns[:, num_rows:] = 0
            columns[_LAST_LENGTHS, num_rows:] = 1
            columns[_TARGETS, num_rows:] = -1
            columns[_REJECTED, num_rows:] = none_rejected
        num_shared = cascade.num_shared if cascade else None
        num_written, is_used_RP = _fill_pages(hosts[0][ends:], size, tables_GRP[0], last_pages, num_shared=num_shared)
        num_used = [ends + num_written]
        for host, slots_R, table_RP in zip(hosts[1:], slots_GR[1:], tables_GRP[1:], strict=True):
            page_ids = table_RP[is_used_RP]
            padding = size + len(page_ids)
            host[:num_rows] = slots_R
            host[num_rows:size] = 0
            host[size:padding] = page_ids
            host[padding : padding + size - num_rows] = PADDING_PAGE
            num_used.append(padding + size - num_rows)
        return num_used

    def _columns(self, size: int) -> Tensor:
        """Return the columns [_COLUMNS, size] in the memory of a step."""
        return self._memory[0][: _COLUMNS * size].view(_COLUMNS, size)

    def _buffers(self, size: int) -> DecodeBuffers:
        (memory, *groups), columns = self._memory, self._columns(size)
        ends, first = _COLUMNS * size, _COLUMNS * size + size + 1
        buffers = DecodeBuffers(
            slot_mapping=columns[_SLOTS],
            starts=memory[ends:first],
            last_lengths=columns[_LAST_LENGTHS],
            page_ids=memory[first:],
            max_pages=self._table.page_tables.tables.shape[2],
            are_bounds=self._table.has_upper_bounds,
            most_tokens=1 + self._table.max_drafts,
        )
        if not groups:
            return buffers
        parts = [replace(buffers, slot_mapping=group[:size], page_ids=group[size:]) for group in groups]
        return replace(buffers, parts=[buffers, *parts])

    def _step(
        self, model: Model, size: int, attention: FixedDecode, tiles: AdapterTiles | None = None
    ) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Return a function that computes a step of ``size`` rows [B]. tiles: for a step with adapters."""
        columns, buffers, table = self._columns(size), self._buffers(size), self._table
        for memory in self._memory:
            memory.zero_()
        columns[_REJECTED] = len(table.is_upper_bound)
        attention.plan_capture(np.ones(size, dtype=np.int32))
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.arange(size, device=self._device) if model.input_spec.rows else None
        adapters = None if tiles is None else FixedAdapters(tiles, tiles)

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            """Return hidden states [B, D], logits [B, W] and token ids [B], which always have the same memory."""
            if table.has_upper_bounds:
                pages = buffers.starts, buffers.page_ids
                sizes = {"page_size": self._inputs.page_size, "lag": self._lag}
                move_rows(columns, pages, table.rejected, sampled=_SAMPLED, **sizes)
            last_tokens = table.last_tokens.index_select(0, columns[_SOURCES])
            features = None if self._features is None else self._read_features(self._features, columns)
            states = None
            if self._inputs.states is not None:  # padding rows write to the padding page
                is_padding = columns[_SLOTS] < self._inputs.page_size
                states = self._inputs.states.of_graph(columns[_SOURCES], columns[_POSITIONS], is_padding)
            options = {"rows": rows, "adapters": adapters, "slots": columns[_SLOTS], "features": features}
            inputs = model_inputs(model, last_tokens, columns[_POSITIONS], **options, states=states)
            hidden = model.forward(inputs, attention)
            if features is not None:
                targets = columns[_TARGETS]
                row_indices = self._row_indices(targets).masked_fill(targets < 0, len(table.sampling))
                self._states.index_copy_(0, row_indices.long(), hidden)
            logits = model.compute_own_logits(hidden)
            if self._samples:
                draws, targets = Draws(columns[_FIELDS:]), columns[_TARGETS]
                self._kernels.sample(logits, draws, token_ids, (targets, table.last_tokens))
            return hidden, logits, token_ids

        return compute

    def _read_features(self, features: Features, columns: Tensor) -> Tensor:
        """Return the hidden states [B, D] that a draft head reads: its own ones after a draft, else the model's."""
        own = self._states.index_select(0, self._row_indices(columns[_SOURCES]))
        is_draft = columns[_SOURCES] >= self._table.first_draft
        return torch.where(is_draft.unsqueeze(1), own, features.read(columns[_SLOTS]))

    def _row_indices(self, indices: Tensor) -> Tensor:
        """Return the row indices [B] of drafts at these indices [B] in ``RowTable.last_tokens``."""
        return (indices - self._table.first_draft) % len(self._table.sampling)

    def _shortened(self) -> Model:
        """Return a model that runs all kernels of a step: without some blocks, if their kernels are known."""
        model = self._model
        return model.shortened() if model.knows_kinds and model.features is None else model

    def _captured(
        self, size: int, attention: FixedDecode, pool: torch.cuda._POOL_HANDLE, tiles: AdapterTiles | None = None
    ) -> _Graph:
        compute = self._step(self._model, size, attention, tiles)
        load_kernels = compute if size == self.max_rows else self._step(self._shortened(), size, attention, tiles)
        load_kernels()  # they must not be loaded or chosen during the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # ``torch.cuda.graph`` would also free unused memory, which takes 10 ms
            graph.capture_begin(pool=pool)
            hidden, logits, token_ids = compute()
            graph.capture_end()
        return _Graph(size, graph, attention, hidden, token_ids, TensorAddress(logits))
