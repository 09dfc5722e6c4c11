"""CUDA graphs of decode steps: from last tokens to next tokens in one launch.

There is one graph for each row count of a ladder. It has all operations of a step, from reading the last tokens
(``RowTable.last_tokens``) to storing the next ones. ``runner.graphs.token_rows`` makes each token of a step a row of
the graph. ``runner.graphs.decode_inputs`` writes these rows to the memory that the graphs read, and pads them. The
graphs share one memory pool, so the largest is captured first.

A graph samples each row with its temperature only. If rows need more (top-k, penalties...), the step uses the hidden
states of the graph and samples outside of it. If they need only grammar masks, these are applied to the logits.

Steps in which many rows start with the same pages use separate graphs with cascade attention, which reads these pages
once (``runner.graphs.shared_prefixes``).

If the positions of a step are upper bounds, its graph first subtracts the rejected drafts (``speculation.proposer``).

With several ranks, each computes the logits of its part of the vocabulary, and the ranks sample together.

R rows of a step, B rows of its graph, D model size, W tokens of a rank, C columns of ``runner.graphs.decode_inputs``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import CapturableAttention, CascadeAttention, FixedCascade, FixedDecode
from aioengine.kernels.adapter_types import AdapterTiles
from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.kernels.triton.drafts import accept, move_rows
from aioengine.kernels.triton.launcher import compile_only
from aioengine.kernels.triton.sampling import Draws, SamplingKernels
from aioengine.layers.ranks import RankGroup
from aioengine.models._base import Model
from aioengine.models._features import Features
from aioengine.runner.graphs.decode_inputs import FIELDS, POSITIONS, SAMPLED, SLOTS, SOURCES, TARGETS, DecodeInputs
from aioengine.runner.graphs.ladder import cascade_ladder, decode_ladder
from aioengine.runner.graphs.shared_prefixes import Cascade, SharedPrefixes
from aioengine.runner.graphs.token_rows import TokenRows, can_expand, expand_rows
from aioengine.runner.inputs import InputBuilder, StepRows, model_inputs
from aioengine.runner.lora.grouping import FixedAdapters, FixedTiles
from aioengine.runner.request_row import SampledRows, needs_only_temperature
from aioengine.runner.rows import RowTable
from aioengine.runner.timing import profiled
from aioengine.scheduler.plan import Row


@dataclass(slots=True)
class _Graph:
    """A captured step of ``num_rows`` rows, which writes hidden [B, D] and token_ids [B].

    Attributes:
        logits: [B, W] of this rank, in memory that other graphs use too; valid until the next replay.
        planned: the cascade for which a graph with cascade attention was last planned.
    """

    num_rows: int
    cuda_graph: torch.cuda.CUDAGraph
    attention: FixedDecode
    hidden: Tensor
    token_ids: Tensor
    logits: TensorAddress
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


class _HeadStates:
    """The hidden states that a draft head reads: its own states after a draft, otherwise states of the model."""

    def __init__(self, features: Features, model: Model, table: RowTable) -> None:
        """features: of the model. model: the draft head."""
        self._features = features
        self._first_draft, self._num_rows = table.first_draft, len(table.sampling)
        size = self._num_rows + 1, model.hidden_size
        # after the newest draft of each request, by row index; the last entry is for rows without a draft
        self._own = torch.zeros(size, dtype=model.dtype, device=table.last_tokens.device)

    def read(self, columns: Tensor) -> Tensor:
        """Return the states [B, D] that the rows with columns [C, B] read."""
        own = self._own.index_select(0, self._row_indices(columns[SOURCES]))
        is_draft = columns[SOURCES] >= self._first_draft
        return torch.where(is_draft.unsqueeze(1), own, self._features.read(columns[SLOTS]))

    def write(self, targets: Tensor, hidden: Tensor) -> None:
        """Store the states [B, D] of the rows with these targets [B]."""
        row_indices = self._row_indices(targets).masked_fill(targets < 0, self._num_rows)
        self._own.index_copy_(0, row_indices.long(), hidden)

    def _row_indices(self, indices: Tensor) -> Tensor:
        """Return the row indices [B] of drafts at these indices [B] in ``RowTable.last_tokens``."""
        return (indices - self._first_draft) % self._num_rows


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
        self.max_rows = max_rows
        self.sizes = decode_ladder(max_rows)
        self._model = model
        self._attention = attention
        self._table = table = inputs.table
        self._builder = inputs
        self._device = table.last_tokens.device
        self._has_ranks = ranks is not None
        self._head_states = None if features is None else _HeadStates(features, model, table)
        self._lag = int(features is not None)  # 1: a draft head, whose position p reads the token at position p + 1
        self._inputs = DecodeInputs(
            inputs,
            max_rows=max_rows,
            short_length=model.input_spec.short_length,
            lag=self._lag,
            waits=not is_draft_model,
        )
        self._samples = ranks is None or ranks.sampling is not None
        self._kernels = SamplingKernels(
            max_rows=max_rows,
            vocab_size=vocab_size,
            num_embeddings=model.vocab_size,
            device=self._device,
            num_parts=1 if ranks is None else ranks.size,
            ranks=None if ranks is None else ranks.sampling,
        )
        self._stream = torch.cuda.Stream(self._device)  # of captures
        self._graphs: dict[int, _Graph] = {}
        self._graphs_with_adapters: dict[int, _Graph] = {}
        self._cascade_graphs: list[tuple[_Graph, FixedCascade]] = []  # ascending, with their attention
        tiles = table.adapters.tiles
        self._tiles = None if tiles is None else FixedTiles(max_rows, tiles, self._device)
        self._prefixes: SharedPrefixes | None = None
        if not is_draft_model and isinstance(attention, CascadeAttention):
            self._prefixes = SharedPrefixes(table, attention.cascade_limits, page_size=inputs.page_size)

    def capture(self, report: Callable[[int, int], None]) -> None:
        """Capture all graphs. report: called with the numbers of captured and of all graphs."""
        attention, tiles, buffers = self._attention, self._tiles, self._inputs.buffers
        plain = {size: attention.fixed_decode(size, buffers(size)) for size in reversed(self.sizes)}
        cascades: dict[int, FixedCascade] = {}
        if self._prefixes is not None and isinstance(attention, CascadeAttention):
            cascade_sizes = cascade_ladder(self.max_rows, min_rows=attention.cascade_limits.min_rows)
            cascades = {size: attention.fixed_cascade(size, buffers(size)) for size in reversed(cascade_sizes)}
        self._compile([*plain.items(), *cascades.items()])
        pool = torch.cuda.graph_pool_handle()
        counts = count(1)
        num_graphs = len(plain) * (1 if tiles is None else 2) + len(cascades)
        report(0, num_graphs)
        if tiles is not None:
            for size, fixed in plain.items():
                self._graphs_with_adapters[size] = self._captured(size, fixed, pool, tiles.for_graph(size))
                report(next(counts), num_graphs)
        for size, fixed in plain.items():
            self._graphs[size] = self._captured(size, fixed, pool)
            report(next(counts), num_graphs)
        for size, cascade in cascades.items():
            self._cascade_graphs.insert(0, (self._captured(size, cascade, pool), cascade))
            report(next(counts), num_graphs)

    def padded(self, num_rows: int) -> int:
        """Return the row count of the smallest graph for ``num_rows`` rows, or ``num_rows`` if no graph is large
        enough.
        """
        return num_rows if num_rows > self.max_rows else self.sizes[bisect_left(self.sizes, num_rows)]

    def fits(self, rows: StepRows, *, has_drafts: bool = False) -> bool:
        """Return whether a graph can compute these rows: each samples, and has one token, or few known tokens after
        its prompt. has_drafts: known tokens are drafts.
        """
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
        table, records = self._table, sampled.records
        is_sampled = needs_only_temperature(records)
        has_readers = table.num_with_logprobs or table.num_with_hidden_states or self._has_ranks  # of the logits
        can_mask = not is_sampled and not has_readers and needs_only_temperature(records, aside_from=table.mask_bit)
        with profiled("prepare"):
            if rows.known_ids.size:
                tokens = expand_rows(rows, table)
                if is_sampled or can_mask:  # otherwise the sampler still needs the previous tokens, for penalties
                    tokens.targets[rows.token_ends - 1] = rows.row_indices
            else:
                tokens = self._one_token_rows(rows, is_sampled=is_sampled)
        graph = self._run(rows, sampled, tokens, when_ready)
        if tokens.cascade is not None:
            return _results(graph, tokens.cascade.inverse, is_sampled=is_sampled)
        lasts = rows.token_ends - 1
        index = table.upload(lasts) if rows.known_ids.size else slice(len(lasts))
        return _results(graph, index, is_sampled=is_sampled, masked=lasts.tolist() if can_mask else None)

    def replay_with_drafts(self, rows: StepRows, sampled: SampledRows, num_drafts: Ints64 | None) -> DecodeStep:
        """Queue a step with drafts, which must fit. Its graph samples after each token; ``accept`` stores the tokens.

        num_drafts: [R] as in ``expand_rows``. Returns results for tokens instead of rows.
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

        Rows without known tokens read the drafts with the previous number. num_unknown: [R] as in ``expand_rows``.
        """
        table, lasts = self._table, rows.token_ends - 1
        index: Tensor | slice = slice(len(lasts))
        targets = table.draft_indices(number, rows.row_indices)
        with profiled("prepare"):
            if not rows.known_ids.size:
                sources = table.draft_indices(number - 1, rows.row_indices)
                tokens = TokenRows(slice(None), rows.row_indices, rows.starts, sources, targets)
            else:
                tokens = expand_rows(rows, table, num_unknown=num_unknown)
                index = table.upload(lasts)
                if tokens.device_chooses_token:
                    tokens.targets[:] = targets[tokens.row_of_token]
                    index -= table.rejected[table.upload(rows.row_indices)]
                else:
                    tokens.targets[lasts] = targets
        return _results(self._run(rows, sampled, tokens), index, is_sampled=needs_only_temperature(sampled.records))

    def _one_token_rows(self, rows: StepRows, *, is_sampled: bool) -> TokenRows:
        """Return rows of one token each, with cascade attention if it saves enough. is_sampled: the graph samples."""
        table, cascade = self._table, None
        has_exact_positions = not table.is_upper_bound.any()
        if self._prefixes is not None and has_exact_positions and table.adapters.slots(rows.row_indices) is None:
            cascade = self._prefixes.find(rows)
        order = slice(None) if cascade is None else cascade.order
        row_indices = rows.row_indices[order]
        targets = row_indices if is_sampled else np.full(len(row_indices), -1)
        return TokenRows(order, row_indices, rows.starts[order], row_indices, targets, cascade)

    def _run(
        self, rows: StepRows, sampled: SampledRows, tokens: TokenRows, when_ready: Callable[[], None] | None = None
    ) -> _Graph:
        """Choose the graph of a step, write its inputs, and queue it."""
        with profiled("prepare"):
            slots = self._table.adapters.slots(tokens.row_indices)
            chosen = self._choose(len(tokens.positions), tokens.cascade, slots)
            plan = self._inputs.fill(chosen.num_rows, rows, sampled, tokens, chosen.attention.max_row_tokens)
            chosen.attention.plan(*plan)
        if when_ready is not None:
            when_ready()
        self._inputs.copy()
        chosen.cuda_graph.replay()
        return chosen

    def draw(self, step: DecodeStep, logits: Tensor) -> Tensor:
        """Sample token ids [R] by temperature from masked logits [>= R, V], and store them in the table. ``step`` must
        be the step that was replayed last.
        """
        num_rows = step.masked[-1] + 1 if step.masked else len(step.hidden)
        columns = self._inputs.columns(step.graph.num_rows)[:, :num_rows]
        token_ids = step.graph.token_ids[:num_rows]
        # rows of one token have no targets, so that the graph samples none; their sources are the same row indices
        targets = columns[SOURCES if step.order is None else TARGETS]
        self._kernels.sample(logits[:num_rows], Draws(columns[FIELDS:]), token_ids, (targets, self._table.last_tokens))
        return token_ids if step.order is None else token_ids[step.order]

    def accept(self, step: DecodeStep, token_ids: Tensor, spans: Tensor) -> None:
        """Accept drafts by the tokens [T] sampled after each token of the last replayed step. spans: see ``accept``."""
        sources = self._inputs.columns(step.graph.num_rows)[SOURCES]
        accept(spans, token_ids, sources, self._table.last_tokens, self._table.rejected)

    def logits(self, step: DecodeStep) -> Tensor:
        """Return the logits [>= R, V] of the last replayed step, by rows of its graph (``DecodeStep.order``). All ranks
        call it together.
        """
        return self._model.gather_logits(step.graph.logits.tensor(self._device))

    def _choose(self, num_rows: int, cascade: Cascade | None, slots: Ints32 | None) -> _Graph:
        """Return the graph for a step. slots: [rows of the graph] adapter slots; None: all rows use the base model."""
        if slots is not None:
            assert self._tiles is not None, "no graph has adapters"
            chosen = self._graphs_with_adapters[self.padded(num_rows)]
            self._tiles.fill(slots, chosen.num_rows)
            return chosen
        if cascade is None:
            return self._graphs[self.padded(num_rows)]
        chosen, attention = next(pair for pair in self._cascade_graphs if pair[0].num_rows >= num_rows)
        if chosen.planned is not cascade:
            attention.plan_shared(cascade.pages)
            chosen.planned = cascade
        return chosen

    def _step_function(
        self, model: Model, size: int, attention: FixedDecode, tiles: AdapterTiles | None = None
    ) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Return a function that computes a step of ``size`` rows [B]. tiles: for a step with adapters."""
        table, columns, buffers = self._table, self._inputs.columns(size), self._inputs.buffers(size)
        sources, targets, positions, slots = columns[SOURCES], columns[TARGETS], columns[POSITIONS], columns[SLOTS]
        attention.plan(*self._inputs.fill_padding(size))
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        rows = torch.arange(size, device=self._device) if model.input_spec.rows else None
        adapters = None if tiles is None else FixedAdapters(tiles, tiles)

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            """Return hidden states [B, D], logits [B, W] and token ids [B], which always have the same memory."""
            if table.has_upper_bounds:
                pages = buffers.starts, buffers.page_ids
                sizes = {"page_size": self._builder.page_size, "lag": self._lag}
                move_rows(columns, pages, table.rejected, sampled=SAMPLED, **sizes)
            last_tokens = table.last_tokens.index_select(0, sources)
            features = None if self._head_states is None else self._head_states.read(columns)
            states = None
            if self._builder.states is not None:  # padding rows write to the padding page
                states = self._builder.states.of_graph(sources, positions, slots < self._builder.page_size)
            options = {"rows": rows, "adapters": adapters, "slots": slots, "features": features, "states": states}
            hidden = model.forward(model_inputs(model, last_tokens, positions, **options), attention)
            if self._head_states is not None:
                self._head_states.write(targets, hidden)
            logits = model.compute_own_logits(hidden)
            if self._samples:
                self._kernels.sample(logits, Draws(columns[FIELDS:]), token_ids, (targets, table.last_tokens))
            return hidden, logits, token_ids

        return compute

    def _shortened(self) -> Model:
        """Return a model that runs all kernels of a step, in less time if it can leave out blocks of the same kind."""
        model = self._model
        return model.shortened() if model.knows_kinds and model.features is None else model

    def _compile(self, steps: list[tuple[int, FixedDecode]]) -> None:
        """Compile the kernels of the steps of these row counts in parallel."""
        tiles, short = self._tiles, self._shortened()
        with compile_only():
            if self._table.max_drafts:
                ids, columns = torch.zeros(5, 1, dtype=torch.int64, device=self._device), self._inputs.columns(1)
                accept(ids, ids[0], columns[SOURCES], self._table.last_tokens, self._table.rejected)
            for size, fixed in steps:
                self._step_function(short, size, fixed)()
                if tiles is not None and size in (1, 2, self.max_rows):  # these use all adapter kernels
                    self._step_function(short, size, fixed, tiles.for_graph(size))()

    def _captured(
        self, size: int, attention: FixedDecode, pool: torch.cuda._POOL_HANDLE, tiles: AdapterTiles | None = None
    ) -> _Graph:
        compute = self._step_function(self._model, size, attention, tiles)
        load_kernels = (
            compute if size == self.max_rows else self._step_function(self._shortened(), size, attention, tiles)
        )
        load_kernels()  # they must not be loaded or chosen during the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # ``torch.cuda.graph`` would also free unused memory, which takes 10 ms
            graph.capture_begin(pool=pool)
            hidden, logits, token_ids = compute()
            graph.capture_end()
        return _Graph(size, graph, attention, hidden, token_ids, TensorAddress(logits))
