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

If drafts follow tokens that the host does not know yet (``PlannedDrafts.num_unknown``), all tokens that the step in
flight may sample are computed before the first draft. The device samples the draft only after the last accepted one.

N requests, R rows of a forward pass, T packed tokens, D model size, V vocabulary, X drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from aioengine.attention._base import AttentionBackend, CapturableAttention, ForwardBatch
from aioengine.protocol.messages import RequestKind
from aioengine.runner.inputs import InputBuilder, StepRows, model_inputs
from aioengine.runner.kv_pool import FIRST_PAGE, KVPool
from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.logits.token_processors import AllowedTokenIds, Bias, MinNewTokens, Penalties
from aioengine.runner.sampling.sampler import FAILED, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.models._base import Model
    from aioengine.models._features import Features
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs
    from aioengine.runner.logits import LogitsProcessor
    from aioengine.runner.request_row import RequestRow, SampledRows
    from aioengine.runner.rows import RowTable
    from aioengine.runner.sampling.device_sampler import DeviceSampler
    from aioengine.runner.transfer import Ints
    from aioengine.scheduler.plan import NewRow, Row


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
    def num_bytes(self) -> int:
        """The bytes of the KV pool and of the hidden states for a draft head."""
        pool = None if self.features is None else self.features.pool
        return self.kv_pool.num_bytes + (0 if pool is None else pool.nbytes)


@dataclass(slots=True)
class DraftedRequest:
    """The tokens of an open request, and how many of them the draft model has computed.

    Attributes:
        token_ids: all known tokens. The owner appends new ones.
        max_length: there are no drafts beyond this number of tokens.
        num_computed: positions whose keys and values the draft model has computed.
    """

    token_ids: list[int]
    max_length: int
    num_computed: int = 0


class PlannedDrafts(NamedTuple):
    """A request, and the number of drafts that it may get. Its pages have memory for them.

    num_unknown: maximum number of its newest tokens that the host does not know yet. It is 0 for all requests of a
    step, or for none.
    """

    drafted: DraftedRequest
    row: RequestRow
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

    def __init__(
        self,
        parts: DraftParts,
        table: RowTable,
        sampler: Sampler | DeviceSampler,
        processors: tuple[LogitsProcessor, ...],
        num_embeddings: int,
    ) -> None:
        """num_embeddings: of the model. The sampler may read this number of logits."""
        self._parts = parts
        self._lag = int(parts.features is not None)  # 1: position p reads the token at position p + 1
        self._table = table
        self._sampler = sampler
        self._num_embeddings = num_embeddings
        kept: tuple[type, ...] = MinNewTokens, Bias, AllowedTokenIds, GrammarMask
        self._has_history = not table.last_tokens.is_cuda
        if self._has_history:
            kept += (Penalties,)
        self._kept_processors = sum(1 << i for i, processor in enumerate(processors) if isinstance(processor, kept))
        self._page_size = parts.kv_pool.page_size
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
            inputs = InputBuilder(
                self._table.for_draft_model(), page_size=self._page_size, num_embeddings=model.vocab_size
            )
            vocab_size = min(vocab_size, model.vocab_size)
            graphs = DecodeGraphs(
                model,
                attention,
                inputs,
                vocab_size=vocab_size,
                max_rows=max_rows,
                is_draft_model=True,
                features=self._parts.features,
            )
            graphs.capture(report)
            self._graphs = graphs

    def open(self, opened: NewRow) -> DraftedRequest | None:
        """Open a request. Return None if it gets no drafts."""
        drafted = None
        if opened.kind is RequestKind.GENERATE and not opened.embeds:
            drafted = DraftedRequest(opened.token_ids.copy(), self._parts.max_length)
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

    def compute(self, spans: list[tuple[DraftedRequest, RequestRow, int]]) -> None:
        """Compute the known tokens of these requests up to the given numbers of positions."""
        spans = [(drafted, row, min(end, _length(drafted) - self._lag)) for drafted, row, end in spans]
        missing = [span for span in spans if span[0].num_computed < span[2] <= span[0].max_length]
        if missing:
            self._extend(missing)

    def can_follow(self, drafted: DraftedRequest, num_unknown: int) -> bool:
        """Return whether there can be drafts after ``num_unknown`` more tokens, with few tokens to compute first."""
        num_missing = _length(drafted) - self._lag - drafted.num_computed
        return self._graphs is not None and num_missing + num_unknown <= 1 + self._table.max_drafts

    def catch_up(self, drafted: DraftedRequest, row: RequestRow) -> None:
        """Record that the known tokens were computed before the drafts of the step in flight."""
        self._advance(drafted, row, _length(drafted) - self._lag)

    def can_propose(self, row: Row) -> bool:
        """Return whether there can be drafts for a row. A draft head needs the hidden state of the model before the
        newest token, so there are none for a row that first computes forced tokens.
        """
        return not self._lag or row.count - row.num_drafts == 1

    def propose(self, planned: list[PlannedDrafts]) -> ProposedDrafts | None:
        """Return the drafts of the requests; None: there are none."""
        planned = [one for one in planned if one.length + one.count <= one.drafted.max_length]
        return self._propose(planned) if planned else None

    def _propose(self, planned: list[PlannedDrafts]) -> ProposedDrafts:
        """Sample the first draft of all requests, then the second, and so on: in graphs, or by ``_forward``."""
        upload, table = self._table.upload, self._table
        ends = [one.length - self._lag for one in planned]
        for one, end in zip(planned, ends, strict=True):
            one.drafted.num_computed = min(one.drafted.num_computed, end - 1)
        row_indices = np.array([one.row.row_index for one in planned], dtype=np.int64)
        lengths = np.array([one.length for one in planned], dtype=np.int64)
        counts = np.array([one.count for one in planned], dtype=np.int64)
        requests = [_with_own_constraint(one.row) for one in planned]
        rows = table.sampled(requests, row_indices, lengths)
        rows.records["processors"] &= self._kept_processors
        active = np.arange(len(planned))
        drafts: list[Tensor] = []
        hidden: Tensor | None = None  # without a graph: hidden states before the next draft of the active requests
        graphs = self._graphs if self._graphs is not None and len(planned) <= self._graphs.max_rows else None
        for number in range(int(counts.max())):
            sampled = rows.part(active, number)
            token_ids = None if graphs is None else self._replay(graphs, planned, sampled, number)
            if token_ids is None:
                if hidden is None:
                    spans = [(one.drafted, one.row, end) for one, end in zip(planned, ends, strict=True)]
                    hidden = self._extend(spans)
                    graphs = None if self._lag else graphs  # graphs of a head read the hidden states of graphs
                token_ids = self._sampler.sample(self._padded(self._parts.model.compute_logits(hidden)), sampled)
                if graphs is not None:
                    table.store_drafts(number, sampled.row_indices, token_ids)
            drafts.append(token_ids)
            if any(request.constraint is not None for request in sampled.requests):
                _follow(sampled.requests, token_ids.tolist())
            if self._has_history and sampled.records["processors"].any():
                table.write_history(sampled, token_ids.clamp(min=0))
            is_active = counts[active] > number + 1
            if not is_active.all():
                kept = upload(np.flatnonzero(is_active))
                active, token_ids = active[is_active], token_ids[kept]
                hidden = None if hidden is None else hidden[kept]
            if active.size and graphs is None:
                ones, starts = np.ones(len(active), dtype=np.int64), lengths[active] + (number - self._lag)
                hidden = self._forward(row_indices[active], starts, ones, token_ids.clamp(min=0), hidden)
        return ProposedDrafts(planned, torch.cat(drafts), is_stored=graphs is not None)

    def by_request(self, drafts: ProposedDrafts, token_ids: list[int]) -> dict[int, list[int]]:
        """Return uid -> drafts, up to the first one that cannot be sampled. Requests without drafts are left out.

        token_ids: as ``ProposedDrafts.token_ids``, on the host.
        """
        found: list[list[int]] = [[] for _ in drafts.planned]
        values = iter(token_ids)
        for number in range(max(one.count for one in drafts.planned)):
            for own, one in zip(found, drafts.planned, strict=True):
                if number < one.count:
                    own.append(next(values))
        for own, one in zip(found, drafts.planned, strict=True):
            if FAILED in own:
                self._fail(one.drafted, one.row)
                if drafts.is_stored:  # it is stored as 0, and verified like other drafts
                    own[:] = [max(token_id, 0) for token_id in own]
                else:
                    del own[own.index(FAILED) :]
        return {one.row.uid: own for own, one in zip(found, drafts.planned, strict=True) if own}

    def _replay(
        self, graphs: DecodeGraphs, planned: list[PlannedDrafts], sampled: SampledRows, number: int
    ) -> Tensor | None:
        """Compute and sample the draft with this number, from 0 on, of these rows [R] in a CUDA graph, and store it in
        the table. Return the drafts [R]; None: too many tokens must be computed before the first draft.
        """
        table, num_rows = self._table, len(sampled.requests)
        starts, known, lag = sampled.positions - 1 - self._lag, self._joined_ids([]), self._lag
        num_unknown: Ints | None = None
        if not number:
            starts = np.array([one.drafted.num_computed for one in planned], dtype=np.int64)
            ids = [one.drafted.token_ids[one.drafted.num_computed + lag :] + [0] * one.num_unknown for one in planned]
            known = self._joined_ids(ids)
            if planned[0].num_unknown:
                num_unknown = np.array([one.num_unknown for one in planned], dtype=np.int64)
        counts = sampled.positions - lag - starts
        rows = StepRows(
            sampled.requests,
            sampled.row_indices,
            starts,
            counts,
            token_ends=counts.cumsum(),
            samples=counts > 0,
            num_known=counts if known.size else np.zeros_like(counts),
            known_ids=known,
        )
        if counts.sum() > graphs.max_rows:
            return None
        replayed = graphs.replay_draft(rows, sampled, number, num_unknown)
        if known.size:
            for one in planned:
                self.catch_up(one.drafted, one.row)
        if replayed.token_ids is not None:
            return replayed.token_ids.clone()  # the next replay overwrites them
        logits = graphs.logits(replayed)
        logits = logits[:num_rows] if replayed.order is None else logits[replayed.order]
        token_ids = self._sampler.sample(self._padded(logits), sampled)
        table.store_drafts(number, sampled.row_indices, token_ids)
        return token_ids

    def accept(self, drafted: DraftedRequest, row: RequestRow, num_proposed: int, num_accepted: int) -> None:
        """Record how many drafts were accepted, before the tokens of the step are added."""
        end = _length(drafted) - self._lag
        if not self._lag:  # the last draft was not computed
            end += min(num_accepted, num_proposed - 1)
        self._advance(drafted, row, end)

    def release(self) -> None:
        """Free the memory of the pool and of the hidden states, until ``resume``."""
        self._parts.kv_pool.release()
        if self._parts.features is not None:
            self._parts.features.release()

    def resume(self) -> None:
        self._parts.kv_pool.resume()
        if self._parts.features is not None:
            self._parts.features.resume()

    def _fail(self, drafted: DraftedRequest, row: RequestRow) -> None:
        """Propose no more drafts for a request for which the draft model gives non-finite numbers."""
        drafted.max_length = 0
        pages = self._table.page_tables.pages(row.row_index)
        self._is_full[pages] = False
        self._parts.kv_pool.clean(pages)

    def _extend(self, spans: list[tuple[DraftedRequest, RequestRow, int]]) -> Tensor:
        """Compute each request up to a number of positions, which is larger than ``num_computed``. Return the hidden
        states [N, D] of their last positions.
        """
        states: dict[int, Tensor] = {}
        left = list(range(len(spans)))
        while left:
            budget = self._parts.max_tokens
            counts: list[int] = []
            for i in left:
                count = min(spans[i][2] - spans[i][0].num_computed, budget)
                if not count:
                    break
                counts.append(count)
                budget -= count
            chosen = [spans[i] for i in left[: len(counts)]]
            firsts = [drafted.num_computed + self._lag for drafted, _, _ in chosen]
            ids = [
                drafted.token_ids[first : first + count]
                for (drafted, _, _), first, count in zip(chosen, firsts, counts, strict=True)
            ]
            hidden = self._forward(
                np.array([row.row_index for _, row, _ in chosen], dtype=np.int64),
                np.array([drafted.num_computed for drafted, _, _ in chosen], dtype=np.int64),
                np.array(counts, dtype=np.int64),
                self._table.upload(self._joined_ids(ids)),
            )
            for i, (drafted, row, _), count, state in zip(left, chosen, counts, hidden, strict=False):
                self._advance(drafted, row, drafted.num_computed + count)
                states[i] = state
            left = [i for i in left if spans[i][0].num_computed < spans[i][2]]
        return torch.stack([states[i] for i in range(len(spans))])

    def _advance(self, drafted: DraftedRequest, row: RequestRow, end: int) -> None:
        """Record that the positions before ``end`` have the keys and values of known tokens."""
        first, last = drafted.num_computed // self._page_size, end // self._page_size
        if last > first:
            self._is_full[self._table.page_tables.tables[0, row.row_index, first:last]] = True
        drafted.num_computed = end

    def _forward(
        self, row_indices: Ints, starts: Ints, counts: Ints, token_ids: Tensor, features: Tensor | None = None
    ) -> Tensor:
        """Compute ``counts`` [R] tokens from positions ``starts`` [R] on, with ids [T]. Return the hidden states [R, D]
        of the last ones.

        features: [T, D] that a draft head reads instead of hidden states of the model; None: it reads these.
        """
        model, attention = self._parts.model, self._parts.attention
        page_size, upload = self._page_size, self._table.upload
        ends, kv_lengths = counts.cumsum(), starts + counts
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(ends[-1]) + np.repeat(kv_lengths - ends, counts)
        pages = self._table.page_tables.tables[0, row_indices, : -(-int(kv_lengths.max()) // page_size)]
        page_indices = positions // page_size
        slots = positions + (pages[row_of_token, page_indices] - page_indices) * page_size
        batch = ForwardBatch(
            slot_mapping=upload(slots),
            page_table=upload(pages),
            query_lengths=counts.tolist(),
            kv_lengths=kv_lengths.tolist(),
        )
        attention.prepare(batch)
        outputs = upload(ends - 1) if len(positions) > len(counts) else None
        kept = self._parts.features
        if kept is None:
            features = None
        elif features is None:
            features = kept.read(batch.slot_mapping)
        inputs = model_inputs(model, token_ids, upload(positions), outputs=outputs, features=features)
        return model.forward(inputs, attention)

    def _joined_ids(self, ids: list[list[int]]) -> Ints:
        """Return known tokens [T] of several rows. Tokens that the draft model does not have become its last one."""
        token_ids = np.array([token_id for row in ids for token_id in row], dtype=np.int64)
        return token_ids.clip(0, self._parts.model.vocab_size - 1)

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


def _length(drafted: DraftedRequest) -> int:
    return len(drafted.token_ids)
