"""Proposes the tokens that a small draft model would sample.

The KV cache of the draft model has the same pages as the KV cache of the model: a position of a request has the same
slot in both. So the prefix cache, preemption and sessions work without further data. The draft model computes a prompt
in the same steps as the model. It computes other tokens only before the next proposal, so steps without drafts take no
longer than in an engine without a draft model. It records the pages that it has computed completely, because a new
request may reuse pages of requests without proposals.

A draft is sampled with the parameters, the seed and the position of the token that it predicts. If both models have
similar logits, the same random number selects the same token: at temperature 1, the demo model accepts 79 % of the
drafts of its own int4 weights, and 64 % of their greedy drafts. Bad words, the user's logits processors, and on a GPU
also penalties are left out: they need the state after each draft.

A draft model may be a draft head (``models._draft_head``). Position p of a head reads the token at position p + 1, so
it can compute one position less than there are known tokens: it lags by one. The first draft after a step reads hidden
states of the model, so the positions of accepted drafts are computed again. The last position of a prefix hit was
computed with the next token of an earlier request. It is not computed again, because other requests share it.

R rows of a forward pass, T packed tokens, K drafts, D model size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionBackend, CapturableAttention
from aioengine.kernels.arrays import Ints64
from aioengine.models._base import Model
from aioengine.models._features import Features
from aioengine.runner.inputs import InputBuilder, StepRows
from aioengine.runner.kv_pool import FIRST_PAGE, KVPool
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logits.token_processors import AllowedTokenIds, Bias, MinNewTokens, Penalties
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, Sampler
from aioengine.scheduler.plan import NewRow, Row

if TYPE_CHECKING:
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs
    from aioengine.runner.sampling.device_sampler import DeviceSampler


class DraftParts(NamedTuple):
    """The parts of a draft model after its weights are loaded.

    kv_pool: with the number of pages of the model's pool. max_length: tokens of the longest request with drafts.
    max_tokens: maximum tokens of a forward pass. features: of a draft head; None: another draft model.
    """

    model: Model
    attention: AttentionBackend
    kv_pool: KVPool
    max_length: int
    max_tokens: int
    features: Features | None = None

    @property
    def pools(self) -> Sequence[KVPool | Features]:
        """The memory that can be released."""
        return [self.kv_pool] if self.features is None else [self.kv_pool, self.features]

    @property
    def num_bytes(self) -> int:
        """The bytes of the KV pool and of the hidden states for a draft head."""
        pool = None if self.features is None else self.features.pool
        return self.kv_pool.num_bytes + (0 if pool is None else pool.nbytes)


@dataclass(slots=True)
class DraftedRequest:
    """An open request that may have drafts.

    Attributes:
        row: its row in the tables of the runner.
        num_rejected: drafts rejected in flight, which the scheduler does not know yet.
        max_length: the draft model proposes no drafts beyond this number of tokens; 0: it proposes none.
        token_ids: all known tokens, if the draft model may propose drafts.
        num_computed: positions whose keys and values the draft model has computed.
    """

    row: RequestRow
    num_rejected: int = 0
    max_length: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0


class DraftPlan(NamedTuple):
    """A request, and the number of drafts that it gets from the draft model. Its pages have memory for them.

    num_unknown: maximum number of its newest tokens that the host does not know yet. It is 0 for all requests of a
    step, or for none.
    """

    drafted: DraftedRequest
    count: int
    num_unknown: int = 0

    @property
    def length(self) -> int:
        """Number of tokens before the drafts; an upper bound if some are unknown."""
        return len(self.drafted.token_ids) + self.num_unknown


@dataclass(frozen=True, slots=True)
class DeviceDrafts:
    """The drafts of some requests, on the device.

    Attributes:
        plans: these requests.
        token_ids: [K] int64, the first draft of each request, then the second ones, and so on. FAILED: it cannot be
            sampled.
        is_stored: ``RowTable.last_tokens`` has them, too.
        fail: called with each request that has a draft that cannot be sampled.
    """

    plans: list[DraftPlan]
    token_ids: Tensor
    is_stored: bool
    fail: Callable[[DraftedRequest], None]

    def by_request(self, token_ids: list[int]) -> dict[int, list[int]]:
        """Return uid -> drafts, up to the first one that cannot be sampled. Requests without drafts are left out.

        token_ids: [K] on the host.
        """
        proposed: dict[int, list[int]] = {}
        values = iter(token_ids)
        for number in range(max(plan.count for plan in self.plans)):
            for plan in self.plans:
                if number < plan.count:
                    proposed.setdefault(plan.drafted.row.uid, []).append(next(values))
        for plan in self.plans:
            ids = proposed[plan.drafted.row.uid]
            if FAILED in ids:
                self.fail(plan.drafted)
                if self.is_stored:  # it is stored as 0, and verified like other drafts
                    ids[:] = [max(token_id, 0) for token_id in ids]
                else:
                    del ids[ids.index(FAILED) :]
        return {uid: ids for uid, ids in proposed.items() if ids}


class DraftModel:
    """The draft model, and the open requests for which it proposes drafts."""

    def __init__(self, parts: DraftParts, table: RowTable, sampler: Sampler | DeviceSampler) -> None:
        self._parts = parts
        self._lag = int(parts.features is not None)  # 1: position p reads the token at position p + 1
        self._table = table
        self._page_size = parts.kv_pool.page_size
        self._inputs = InputBuilder(
            table.for_draft_model(), page_size=self._page_size, num_embeddings=parts.model.vocab_size
        )
        self._sampler = sampler
        self._has_history = not table.last_tokens.is_cuda
        self._kept_processors = table.processor_bits(MinNewTokens, Bias, AllowedTokenIds, GrammarMask)
        if self._has_history:
            self._kept_processors |= table.processor_bits(Penalties)
        self._is_full = np.zeros(FIRST_PAGE + parts.kv_pool.num_pages, dtype=np.bool_)  # pages computed completely
        self._unseen: dict[int, tuple[list[int], DraftedRequest | None]] = {}  # uid -> pages, until its first row
        self._graphs: DecodeGraphs | None = None

    def capture_graphs(self, vocab_size: int, max_rows: int, report: Callable[[int, int], None]) -> None:
        """Capture decode steps of up to ``max_rows`` rows as CUDA graphs, if the attention backend supports them.

        vocab_size: they sample tokens below this.
        """
        from aioengine.runner.graphs.decode_graphs import DecodeGraphs  # imports Triton

        model, attention = self._parts.model, self._parts.attention
        if isinstance(attention, CapturableAttention) and not model.input_spec.rows:
            graphs = DecodeGraphs(
                model,
                attention,
                self._inputs,
                vocab_size=min(vocab_size, model.vocab_size),
                max_rows=max_rows,
                is_draft_model=True,
                features=self._parts.features,
            )
            graphs.capture(report)
            self._graphs = graphs

    def open(self, opened: NewRow, drafted: DraftedRequest | None) -> None:
        """Open a request. drafted: None if it gets no drafts."""
        if drafted is not None and not opened.embeds:
            drafted.token_ids, drafted.max_length = opened.token_ids.copy(), self._parts.max_length
        self._unseen[opened.uid] = opened.pages, drafted

    def close(self, uid: int) -> None:
        """Close a request. An unknown uid is ignored."""
        self._unseen.pop(uid, None)

    def note_pages(self, rows: list[Row]) -> None:
        """Record which pages of the rows of a step are new, and which are a prefix hit."""
        num_groups = len(self._table.page_tables.tables)
        for row in rows:
            new = row.new_pages
            pages, drafted = self._unseen.pop(row.uid, ([], None)) if self._unseen else ([], None)
            if pages:
                num_shared = -(-row.start // self._page_size) * num_groups
                shared, new = np.array(pages[:num_shared:num_groups], dtype=np.int64), [*pages[num_shared:], *new]
                if drafted is not None:
                    num_full = int(np.append(self._is_full[shared + FIRST_PAGE], False).argmin())
                    drafted.num_computed = min(num_full * self._page_size, row.start)
            if new:
                self._is_full[np.array(new) + FIRST_PAGE] = False

    def compute(self, spans: list[tuple[DraftedRequest, int]]) -> None:
        """Compute the known tokens of these requests up to the given numbers of positions, or the first of these tokens
        if they are too many for a step.
        """
        spans = [(drafted, min(end, self._num_computable(drafted))) for drafted, end in spans]
        missing = [(drafted, end) for drafted, end in spans if drafted.num_computed < end <= drafted.max_length]
        if missing:
            self._extend(sorted(missing, key=lambda span: span[1] - span[0].num_computed))

    def note_computed(self, drafted: DraftedRequest) -> None:
        """Record that a step in flight has computed all known tokens of a request."""
        self._advance(drafted, self._num_computable(drafted))

    def note_accepted(self, drafted: DraftedRequest, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts were accepted, before the tokens of the step are added."""
        end = self._num_computable(drafted)
        if not self._lag:  # the last draft was not computed
            end += min(num_accepted, num_proposed - 1)
        self._advance(drafted, end)

    def can_follow(self, drafted: DraftedRequest, num_unknown: int) -> bool:
        """Return whether a graph can compute the missing tokens of a request, and ``num_unknown`` tokens after them."""
        num_missing = self._num_computable(drafted) - drafted.num_computed
        return self._graphs is not None and num_missing + num_unknown <= 1 + self._table.max_drafts

    def can_propose(self, row: Row) -> bool:
        """Return whether there can be drafts for a row. A draft head needs the hidden state of the model before the
        newest token, so there are none for a row that first computes forced tokens.
        """
        return not self._lag or row.count - row.num_drafts == 1

    def propose(self, plans: list[DraftPlan]) -> DeviceDrafts | None:
        """Return the drafts of the requests; None: there are none. If too many tokens before the drafts of a request
        are missing, some of them are computed instead.
        """
        ready: list[DraftPlan] = []
        behind: list[tuple[DraftedRequest, int]] = []
        budget = self._parts.max_tokens
        for plan in plans:
            if plan.length + plan.count > plan.drafted.max_length:
                continue
            num_missing = max(plan.length - self._lag - plan.drafted.num_computed, 1)
            if num_missing > budget:
                behind.append((plan.drafted, plan.length))
            else:
                ready.append(plan)
                budget -= num_missing
        self.compute(behind)
        return self._sample_drafts(ready) if ready else None

    def _sample_drafts(self, plans: list[DraftPlan]) -> DeviceDrafts:
        """Compute the tokens before the drafts. Sample the first draft of all requests, then the second, and so on.

        A graph computes a token and samples the draft after it. Without a graph, ``_forward`` returns the hidden states
        [R, D] from which drafts are sampled. R becomes smaller if some requests have fewer drafts.
        """
        ends = [plan.length - self._lag for plan in plans]
        for plan, end in zip(plans, ends, strict=True):
            plan.drafted.num_computed = min(plan.drafted.num_computed, end - 1)
        num_missing = sum(ends) - sum(plan.drafted.num_computed for plan in plans)
        counts = np.array([plan.count for plan in plans], dtype=np.int64)
        rows = self._sampled_rows(plans)
        drafts: list[Tensor] = []
        graphs = self._graphs if self._graphs is not None and len(plans) <= self._graphs.max_rows else None
        hidden: Tensor | None = None  # None: a graph computes the next draft
        if graphs is None or num_missing > graphs.max_rows:  # no graph computes the tokens before the drafts
            hidden = self._extend([(plan.drafted, end) for plan, end in zip(plans, ends, strict=True)])
            graphs = None if self._lag else graphs  # graphs of a head read the hidden states of graphs
        for number in range(int(counts.max())):
            if hidden is None:
                assert graphs is not None
                token_ids = self._replay(graphs, plans, rows, number)
            else:
                token_ids = self._sample(self._parts.model.compute_logits(hidden), rows)
                if graphs is not None:
                    self._table.store_drafts(number, rows.row_indices, token_ids)
            drafts.append(token_ids)
            self._follow(rows, token_ids)
            kept = np.flatnonzero(counts > number + 1)  # rows with a further draft
            rows, counts = rows.part(kept, 1), counts[kept]
            if graphs is not None:
                hidden = None
            elif hidden is not None and kept.size:
                lasts, indices = rows.positions - 1 - self._lag, self._table.upload(kept)
                step_rows = self._step_rows(rows.requests, lasts, lasts + 1, [])
                hidden = self._forward(step_rows, token_ids[indices].clamp(min=0), hidden[indices])
        return DeviceDrafts(plans, torch.cat(drafts), is_stored=graphs is not None, fail=self._fail)

    def _sampled_rows(self, plans: list[DraftPlan]) -> SampledRows:
        """Return the rows [R] of these requests at the positions of their first drafts. Their constraints are copies,
        which follow drafts.
        """
        requests = [plan.drafted.row for plan in plans]
        row_indices = np.array([request.row_index for request in requests], dtype=np.int64)
        positions = np.array([plan.length for plan in plans], dtype=np.int64)
        rows = self._table.sampled([_with_own_constraint(request) for request in requests], row_indices, positions)
        rows.records["processors"] &= self._kept_processors
        return rows

    def _replay(self, graphs: DecodeGraphs, plans: list[DraftPlan], rows: SampledRows, number: int) -> Tensor:
        """Compute and sample the draft with this number, from 0 on, of these rows [R] in a CUDA graph, and store it in
        the table. The first one also computes all tokens before it. Return the drafts [R].
        """
        starts, ids = rows.positions - 1 - self._lag, list[list[int]]()
        num_unknown: Ints64 | None = None
        if not number:
            starts = np.array([plan.drafted.num_computed for plan in plans], dtype=np.int64)
            firsts = (starts + self._lag).tolist()
            ids = [plan.drafted.token_ids[i:] + [0] * plan.num_unknown for plan, i in zip(plans, firsts, strict=True)]
            if plans[0].num_unknown:
                num_unknown = np.array([plan.num_unknown for plan in plans], dtype=np.int64)
        step_rows = self._step_rows(rows.requests, starts, rows.positions - self._lag, ids)
        step = graphs.replay_draft(step_rows, rows, number, num_unknown)
        if not number:
            for plan in plans:
                self.note_computed(plan.drafted)
        if step.token_ids is not None:
            return step.token_ids.clone()  # the next replay overwrites them
        logits = graphs.logits(step)
        token_ids = self._sample(logits[: len(starts)] if step.order is None else logits[step.order], rows)
        self._table.store_drafts(number, rows.row_indices, token_ids)
        return token_ids

    def _sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Sample drafts [R] from logits [R, V]. The sampler may read as many logits as the model has embeddings."""
        padded = functional.pad(logits, (0, max(self._table.num_embeddings - logits.shape[1], 0)))
        return self._sampler.sample(padded, rows)

    def _follow(self, rows: SampledRows, token_ids: Tensor) -> None:
        """Follow the drafts [R] of these rows in their grammars, and count them for penalties."""
        if any(request.constraint is not None for request in rows.requests):
            for request, token_id in zip(rows.requests, token_ids.tolist(), strict=True):
                constraint = request.constraint
                if constraint is not None and not constraint.is_over and token_id != FAILED:
                    constraint.advance(token_id)
        if self._has_history and rows.records["processors"].any():
            self._table.write_history(rows, token_ids.clamp(min=0))

    def _fail(self, drafted: DraftedRequest) -> None:
        """Propose no more drafts for a request for which the draft model gives non-finite numbers."""
        drafted.max_length = 0
        pages = self._table.page_tables.pages(drafted.row.row_index)
        self._is_full[pages] = False
        self._parts.kv_pool.clean(pages)

    def _extend(self, spans: list[tuple[DraftedRequest, int]]) -> Tensor:
        """Compute the positions of each request from ``num_computed`` up to the given end, request by request until the
        step is full. Return the hidden states [R, D] of the last computed position of each request.
        """
        missing = np.array([end - drafted.num_computed for drafted, end in spans], dtype=np.int64)
        counts = np.diff(missing.cumsum().clip(max=self._parts.max_tokens), prepend=0)
        counts = counts[counts > 0]
        chosen = [drafted for drafted, _ in spans[: len(counts)]]
        starts = np.array([drafted.num_computed for drafted in chosen], dtype=np.int64)
        ends = starts + counts
        ids = [
            drafted.token_ids[start + self._lag : end + self._lag]
            for drafted, start, end in zip(chosen, starts.tolist(), ends.tolist(), strict=True)
        ]
        hidden = self._forward(self._step_rows([drafted.row for drafted in chosen], starts, ends, ids))
        for drafted, end in zip(chosen, ends.tolist(), strict=True):
            self._advance(drafted, end)
        return hidden

    def _num_computable(self, drafted: DraftedRequest) -> int:
        """Return the number of positions that can be computed from the known tokens."""
        return len(drafted.token_ids) - self._lag

    def _advance(self, drafted: DraftedRequest, end: int) -> None:
        """Record that the positions before ``end`` have the keys and values of known tokens."""
        first, last = drafted.num_computed // self._page_size, end // self._page_size
        if last > first:
            self._is_full[self._table.page_tables.tables[0, drafted.row.row_index, first:last]] = True
        drafted.num_computed = end

    def _forward(self, rows: StepRows, drafts: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """Compute these rows, without a graph. Return the hidden states [R, D] of their last tokens.

        drafts: [R] the tokens of the rows; None: the host knows them.
        features: [R, D] that a draft head reads instead of hidden states of the model; None: it reads these.
        """
        model, attention, model_features = self._parts.model, self._parts.attention, self._parts.features
        outputs, num_rows = rows.token_ends - 1, len(rows.requests)
        inputs, batch = self._inputs.build(model, rows, outputs, num_outputs=num_rows, token_ids=drafts)
        attention.prepare(batch)
        if model_features is not None:
            features = model_features.read(batch.slot_mapping) if features is None else features
            inputs = replace(inputs, features=features)
        return model.forward(inputs, attention)

    def _step_rows(self, requests: list[RequestRow], starts: Ints64, ends: Ints64, ids: list[list[int]]) -> StepRows:
        """Return rows [R] of the positions from starts [R] to ends [R]. ids: their tokens; empty: the device has them.

        Tokens that the draft model does not have become its last one.
        """
        counts = ends - starts
        known = np.array([token_id for row in ids for token_id in row], dtype=np.int64)
        return StepRows(
            requests,
            np.array([request.row_index for request in requests], dtype=np.int64),
            starts,
            counts,
            token_ends=counts.cumsum(),
            samples=counts > 0,
            num_known=counts if ids else np.zeros_like(counts),
            known_ids=known.clip(0, self._parts.model.vocab_size - 1),
        )


def _with_own_constraint(row: RequestRow) -> RequestRow:
    """Return the row with a copy of its constraint, which follows drafts."""
    return row if row.constraint is None else replace(row, constraint=row.constraint.copy(), forced_end=0)
