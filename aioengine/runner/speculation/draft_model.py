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

``speculation.proposer`` explains drafts after tokens that the host does not know yet.

N requests, R rows of a forward pass, T packed tokens, D model size, V vocabulary, X drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionBackend, CapturableAttention
from aioengine.models._base import Model
from aioengine.models._features import Features
from aioengine.protocol.messages import RequestKind
from aioengine.runner.inputs import InputBuilder, StepRows
from aioengine.runner.kv_pool import FIRST_PAGE, KVPool
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logits.token_processors import AllowedTokenIds, Bias, MinNewTokens, Penalties
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, Sampler
from aioengine.runner.transfer import Ints
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
    """The tokens of an open request, and how many of them the draft model has computed.

    Attributes:
        row: the open request.
        token_ids: all known tokens. The owner appends new ones.
        max_length: there are no drafts beyond this number of tokens.
        num_computed: positions whose keys and values the draft model has computed.
    """

    row: RequestRow
    token_ids: list[int]
    max_length: int
    num_computed: int = 0


class PlannedDrafts(NamedTuple):
    """A request, and the number of drafts that it may get. Its pages have memory for them.

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
class ProposedDrafts:
    """The drafts of some requests, on the device.

    Attributes:
        planned: these requests.
        token_ids: [X] int64, the first draft of each request, then the second ones, and so on. FAILED: it cannot be
            sampled.
        is_stored: ``RowTable.last_tokens`` has them, too.
    """

    planned: list[PlannedDrafts]
    token_ids: Tensor
    is_stored: bool


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
        self._num_embeddings = table.num_embeddings  # the sampler may read this number of logits
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

    def open(self, opened: NewRow, row: RequestRow) -> DraftedRequest | None:
        """Open a request. Return None if it gets no drafts."""
        drafted = None
        if opened.kind is RequestKind.GENERATE and not opened.embeds:
            drafted = DraftedRequest(row, opened.token_ids.copy(), self._parts.max_length)
        self._unseen[opened.uid] = opened.pages, drafted
        return drafted

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

    def can_follow(self, drafted: DraftedRequest, num_unknown: int) -> bool:
        """Return whether there can be drafts after ``num_unknown`` more tokens, with few tokens to compute first."""
        num_missing = self._num_computable(drafted) - drafted.num_computed
        return self._graphs is not None and num_missing + num_unknown <= 1 + self._table.max_drafts

    def catch_up(self, drafted: DraftedRequest) -> None:
        """Record that the known tokens were computed before the drafts of the step in flight."""
        self._advance(drafted, self._num_computable(drafted))

    def can_propose(self, row: Row) -> bool:
        """Return whether there can be drafts for a row. A draft head needs the hidden state of the model before the
        newest token, so there are none for a row that first computes forced tokens.
        """
        return not self._lag or row.count - row.num_drafts == 1

    def propose(self, planned: list[PlannedDrafts]) -> ProposedDrafts | None:
        """Return the drafts of the requests; None: there are none. If too many tokens before the drafts of a request
        are missing, some of them are computed instead.
        """
        ready: list[PlannedDrafts] = []
        behind: list[tuple[DraftedRequest, int]] = []
        left = self._parts.max_tokens
        for one in planned:
            if one.length + one.count > one.drafted.max_length:
                continue
            num_missing = max(one.length - self._lag - one.drafted.num_computed, 1)
            if num_missing > left:
                behind.append((one.drafted, one.length))
            else:
                ready.append(one)
                left -= num_missing
        self.compute(behind)
        return self._propose(ready) if ready else None

    def _propose(self, planned: list[PlannedDrafts]) -> ProposedDrafts:
        """Sample the first draft of all requests, then the second, and so on: in graphs, or by ``_forward``."""
        table = self._table
        ends = [one.length - self._lag for one in planned]
        for one, end in zip(planned, ends, strict=True):
            one.drafted.num_computed = min(one.drafted.num_computed, end - 1)
        row_indices = np.array([one.drafted.row.row_index for one in planned], dtype=np.int64)
        lengths = np.array([one.length for one in planned], dtype=np.int64)
        counts = np.array([one.count for one in planned], dtype=np.int64)
        sampled = table.sampled([_with_own_constraint(one.drafted.row) for one in planned], row_indices, lengths)
        sampled.records["processors"] &= self._kept_processors
        drafts: list[Tensor] = []
        graphs = self._graphs if self._graphs is not None and len(planned) <= self._graphs.max_rows else None
        hidden: Tensor | None = None  # states from which the next draft is sampled; None: a graph computes and samples
        num_missing = sum(ends) - sum(one.drafted.num_computed for one in planned)
        if graphs is None or num_missing > graphs.max_rows:
            hidden = self._extend([(one.drafted, end) for one, end in zip(planned, ends, strict=True)])
            graphs = None if self._lag else graphs  # graphs of a head read the hidden states of graphs
        for number in range(int(counts.max())):
            if hidden is not None:
                token_ids = self._sampler.sample(self._padded(self._parts.model.compute_logits(hidden)), sampled)
                if graphs is not None:
                    table.store_drafts(number, sampled.row_indices, token_ids)
            else:
                assert graphs is not None
                token_ids = self._replay(graphs, planned, sampled, number)
            drafts.append(token_ids)
            if any(request.constraint is not None for request in sampled.requests):
                _follow(sampled.requests, token_ids.tolist())
            if self._has_history and sampled.records["processors"].any():
                table.write_history(sampled, token_ids.clamp(min=0))
            left = np.flatnonzero(counts > number + 1)
            sampled, counts = sampled.part(left, 1), counts[left]
            if graphs is not None:
                hidden = None
            elif hidden is not None and left.size:
                last = sampled.positions - 1 - self._lag
                rows, kept = self._rows(sampled.requests, last, last + 1, []), table.upload(left)
                hidden = self._forward(rows, token_ids[kept].clamp(min=0), hidden[kept])
        return ProposedDrafts(planned, torch.cat(drafts), is_stored=graphs is not None)

    def by_request(self, drafts: ProposedDrafts, token_ids: list[int]) -> dict[int, list[int]]:
        """Return uid -> drafts, up to the first one that cannot be sampled. Requests without drafts are left out.

        token_ids: as ``ProposedDrafts.token_ids``, on the host.
        """
        proposed: list[list[int]] = [[] for _ in drafts.planned]
        values = iter(token_ids)
        for number in range(max(one.count for one in drafts.planned)):
            for own, one in zip(proposed, drafts.planned, strict=True):
                if number < one.count:
                    own.append(next(values))
        for own, one in zip(proposed, drafts.planned, strict=True):
            if FAILED in own:
                self._fail(one.drafted)
                if drafts.is_stored:  # it is stored as 0, and verified like other drafts
                    own[:] = [max(token_id, 0) for token_id in own]
                else:
                    del own[own.index(FAILED) :]
        return {one.drafted.row.uid: own for own, one in zip(proposed, drafts.planned, strict=True) if own}

    def _replay(self, graphs: DecodeGraphs, planned: list[PlannedDrafts], sampled: SampledRows, number: int) -> Tensor:
        """Compute and sample the draft with this number, from 0 on, of these rows [R] in a CUDA graph, and store it in
        the table. The first one also computes all tokens before it. Return the drafts [R].
        """
        starts, ids = sampled.positions - 1 - self._lag, list[list[int]]()
        num_unknown: Ints | None = None
        if not number:
            starts = np.array([one.drafted.num_computed for one in planned], dtype=np.int64)
            firsts = (starts + self._lag).tolist()
            ids = [one.drafted.token_ids[i:] + [0] * one.num_unknown for one, i in zip(planned, firsts, strict=True)]
            if planned[0].num_unknown:
                num_unknown = np.array([one.num_unknown for one in planned], dtype=np.int64)
        rows = self._rows(sampled.requests, starts, sampled.positions - self._lag, ids)
        step = graphs.replay_draft(rows, sampled, number, num_unknown)
        if not number:
            for one in planned:
                self.catch_up(one.drafted)
        if step.token_ids is not None:
            return step.token_ids.clone()  # the next replay overwrites them
        logits = graphs.logits(step)
        logits = logits[: len(starts)] if step.order is None else logits[step.order]
        token_ids = self._sampler.sample(self._padded(logits), sampled)
        self._table.store_drafts(number, sampled.row_indices, token_ids)
        return token_ids

    def accept(self, drafted: DraftedRequest, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts were accepted, before the tokens of the step are added."""
        end = self._num_computable(drafted)
        if not self._lag:  # the last draft was not computed
            end += min(num_accepted, num_proposed - 1)
        self._advance(drafted, end)

    def _fail(self, drafted: DraftedRequest) -> None:
        """Propose no more drafts for a request for which the draft model gives non-finite numbers."""
        drafted.max_length = 0
        pages = self._table.page_tables.pages(drafted.row.row_index)
        self._is_full[pages] = False
        self._parts.kv_pool.clean(pages)

    def _extend(self, spans: list[tuple[DraftedRequest, int]]) -> Tensor:
        """Compute each request up to a number of positions, which is larger than ``num_computed``, but only as many
        positions of the first requests as fit into a step. Return the hidden states [N, D] of their last ones.
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
        hidden = self._forward(self._rows([drafted.row for drafted in chosen], starts, ends, ids))
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
        model, attention, of_model = self._parts.model, self._parts.attention, self._parts.features
        outputs, num_rows = rows.token_ends - 1, len(rows.requests)
        inputs, batch = self._inputs.build(model, rows, outputs, num_outputs=num_rows, token_ids=drafts)
        attention.prepare(batch)
        if of_model is not None:
            inputs = replace(inputs, features=of_model.read(batch.slot_mapping) if features is None else features)
        return model.forward(inputs, attention)

    def _rows(self, requests: list[RequestRow], starts: Ints, ends: Ints, ids: list[list[int]]) -> StepRows:
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

    def _padded(self, logits: Tensor) -> Tensor:
        """Logits [R, V] -> [R, at least ``num_embeddings``]."""
        return functional.pad(logits, (0, max(self._num_embeddings - logits.shape[1], 0)))


def _with_own_constraint(row: RequestRow) -> RequestRow:
    """Return a row whose constraint, if it has one, may follow drafts."""
    return row if row.constraint is None else replace(row, constraint=row.constraint.copy(), forced_end=0)


def _follow(requests: list[RequestRow], token_ids: list[int]) -> None:
    """Follow the drafts of these requests in their grammars."""
    for request, token_id in zip(requests, token_ids, strict=True):
        constraint = request.constraint
        if constraint is not None and not constraint.is_over and token_id != FAILED:
            constraint.advance(token_id)
