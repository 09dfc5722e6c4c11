"""Samples tokens at the positions of drafts, and accepts the drafts that equal them.

If no row needs more than a temperature, a graph samples after each token of the step, and the device accepts drafts
(``Verifier.accept_on_device``). Otherwise the host waits for the tokens (``Verifier.verify``).

S rows that sample, T tokens of the step, K drafts of the step, N positions, D model size, V vocabulary, X entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.layers.ranks import RankGroup
from aioengine.runner.hidden_states import HiddenStates
from aioengine.runner.inputs import StepRows
from aioengine.runner.kv_pool import KVPool
from aioengine.runner.logprobs import Logprobs
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, Sampler
from aioengine.runner.speculation.step_drafts import StepDrafts
from aioengine.runner.transfer import Readback
from aioengine.settings.memory_model import SAMPLED_ROWS

if TYPE_CHECKING:
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs, DecodeStep
    from aioengine.runner.sampling.device_sampler import DeviceSampler


class Verification:
    """Compares the tokens that S rows sample with their drafts.

    Some rows sample one position after the other, because a token depends on the tokens before (penalties, grammars),
    or because something is returned for it (logprobs). Other rows sample all positions at once.

    Attributes:
        counts: [S] number of accepted drafts of each row so far.
        final: [S] the last token of each row so far; FAILED: it cannot be sampled.
        active: the rows that sample next. The owner sets it first.
        followed: rows whose grammar has followed the last token, because the grammar is over, or because the next token
            cannot be sampled.
    """

    def __init__(self, drafts: Sequence[Sequence[int]], one_by_one: list[bool]) -> None:
        """drafts, one_by_one: of each row [S]. A row may have no drafts."""
        self.drafts = drafts
        self.counts = [0] * len(drafts)
        self.final = [FAILED] * len(drafts)
        self.active: list[int] = []
        self.followed: set[int] = set()
        self._one_by_one = one_by_one

    def entries(self) -> list[tuple[int, int]]:
        """Return the positions to sample next, as pairs of a row and the number of drafts before the position. Call
        ``take`` with their tokens.
        """
        active, self.active = self.active, []
        entries: list[tuple[int, int]] = []
        for row in active:
            first = self.counts[row]
            last = first if self._one_by_one[row] else len(self.drafts[row])
            entries += [(row, count) for count in range(first, last + 1)]
        return entries

    def take(self, entries: list[tuple[int, int]], token_ids: list[int]) -> dict[int, int]:
        """Accept drafts by the tokens of these entries. Return row -> index of its last entry whose token counts.

        A token that cannot be sampled after an accepted draft does not count: the next step samples it again.
        """
        kept: dict[int, int] = {}
        is_open = dict.fromkeys((row for row, _ in entries), True)
        for index, ((row, count), token_id) in enumerate(zip(entries, token_ids, strict=True)):
            if not is_open[row]:
                continue
            if token_id == FAILED and count:
                self.counts[row] = count - 1
                self.followed.add(row)
                is_open[row] = False
                continue
            kept[row] = index
            self.counts[row], self.final[row] = count, token_id
            drafts = self.drafts[row]
            is_open[row] = count < len(drafts) and token_id == drafts[count]
            if is_open[row] and self._one_by_one[row]:
                self.counts[row] = count + 1
                self.active.append(row)
        return kept

    def stop(self, row: int) -> None:
        """End an active row with the token of its last entry, after which its grammar is over."""
        self.active.remove(row)
        self.followed.add(row)
        self.counts[row] -= 1


def num_accepted(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the number of accepted drafts of a row. token_ids: sampled at their positions, and after the last one."""
    count = 0
    while count < len(drafts) and drafts[count] == token_ids[count]:
        count += 1
    if count and token_ids[count] == FAILED:  # as in ``Verification.take``
        count -= 1
    return count


def row_groups(counts: Sequence[int], max_positions: int) -> Iterator[range]:
    """Divide rows into groups with up to ``max_positions`` positions. counts: positions of each row."""
    start = num_positions = 0
    for row, count in enumerate(counts):
        if num_positions and num_positions + count > max_positions:
            yield range(start, row)
            start, num_positions = row, 0
        num_positions += count
    if start < len(counts):
        yield range(start, len(counts))


class SampledTokens(Readback):
    """The tokens [T] sampled at all positions of a step. The device has accepted drafts. The host accepts the same
    drafts when it knows these tokens.

    Attributes:
        last_indices: [S] index among these tokens of the last one of each row. It is FAILED if the hidden states of any
            draft of the row are not finite.
    """

    __slots__ = ("_accept", "_last_tokens", "last_indices")

    def __init__(self, token_ids: Tensor, last_indices: list[int], accept: Callable[[list[int]], list[int]]) -> None:
        """accept: called once with ``token_ids`` [T] on the host; returns the last token of each row [S]."""
        super().__init__(token_ids)
        self.last_indices = last_indices
        self._accept = accept
        self._last_tokens: list[int] | None = None

    def wait(self) -> list[int]:
        """Wait for the device and return the last token of each row [S]."""
        if self._last_tokens is None:
            self._last_tokens = self._accept(super().wait())
        return self._last_tokens


@dataclass(eq=False)
class Verifier:
    """Verifies the drafts of steps.

    Attributes:
        sampler: of rank 0. ranks: None if there is one rank.
        compute_logits: logits [N, V] from hidden states [N, D].
        logprobs, hidden_states: collect the requested logprobs and hidden states.
        errors: uid -> error of a custom processor.
    """

    table: RowTable
    sampler: Sampler | DeviceSampler
    kv_pool: KVPool
    ranks: RankGroup | None
    compute_logits: Callable[[Tensor], Tensor]
    logprobs: Logprobs
    hidden_states: HiddenStates
    errors: dict[int, str]

    def accept_on_device(
        self, graphs: DecodeGraphs, step: DecodeStep, rows: StepRows, sampled: SampledRows, drafts: StepDrafts
    ) -> SampledTokens:
        """Let the device accept the drafts of a replayed step. Return the tokens sampled at all positions [T]. They are
        sampled here if the graph did not.

        sampled: the rows, with the positions of their first sampled tokens.
        """
        requests, row_indices, token_ids = sampled.requests, sampled.row_indices, step.token_ids
        counts = drafts.counts(requests)
        firsts = rows.token_ends - 1 - counts
        if token_ids is None:
            row_of_token = np.repeat(np.arange(len(firsts)), rows.counts)
            offsets = np.arange(len(row_of_token)) - firsts[row_of_token]
            token_ids = self.sampler.sample(graphs.logits(step)[: len(offsets)], sampled.part(row_of_token, offsets))
        num_planned = np.array([drafts.planned.get(request.uid, 0) for request in requests], dtype=np.int64)
        spans = np.stack([row_indices, firsts, counts, num_planned, self.table.draft_indices(-1, row_indices)])
        graphs.accept(step, token_ids, self.table.upload(spans))
        drafts.accepts_on_device = True
        if drafts.on_device is not None:
            token_ids = torch.cat([token_ids, drafts.on_device.token_ids])
        accept = partial(self._accept_on_host, requests, drafts, firsts.tolist())
        return SampledTokens(token_ids, (rows.token_ends - 1).tolist(), accept)

    def _accept_on_host(
        self, requests: list[RequestRow], drafts: StepDrafts, firsts: list[int], token_ids: list[int]
    ) -> list[int]:
        """Accept the same drafts as the device. Return the last token of each row [S].

        firsts: [S] index of the first sampled token of each row. token_ids: [T] the sampled tokens, then [K] the drafts
        that were only on the device.
        """
        if drafts.on_device is not None:
            drafts.read(token_ids[-len(drafts.on_device.token_ids) :])
        last_tokens: list[int] = []
        for request, ids, first in zip(requests, drafts.of_requests(requests), firsts, strict=True):
            sampled = token_ids[first : first + len(ids) + 1]
            count = num_accepted(ids, sampled)
            drafts.accepted[request.uid] = ids[:count]
            last_tokens.append(sampled[count])
            if FAILED in sampled[1:] and self.table.requests.get(request.uid) is request:
                self.kv_pool.clean(self.table.pages(request.uid))  # a draft is not finite, as in ``verify``
        return last_tokens

    def verify(self, hidden: Tensor, before_drafts: Tensor, rows: SampledRows, drafts: StepDrafts) -> list[int]:
        """Sample the rows and accept their drafts. Return the last token of each row [S].

        hidden: [S, D] after all drafts of each row. before_drafts: [K, D] before each draft, row by row.
        rows: with the positions of the first tokens.
        """
        proposed = drafts.of_requests(rows.requests)
        verification = Verification(proposed, must_sample_one_by_one(rows.requests, rows.records))
        num_before = np.cumsum([0, *map(len, proposed)]).tolist()
        all_hidden = torch.cat((hidden, before_drafts))
        for group in row_groups([len(ids) + 1 for ids in proposed], SAMPLED_ROWS):
            sources: list[int] = []
            firsts: dict[int, int] = {}
            for row in group:
                first = len(rows.requests) + num_before[row]
                firsts[row] = len(sources)
                sources += [*range(first, first + len(proposed[row])), row]
            states = all_hidden[self.table.upload(np.array(sources, dtype=np.int64))]
            logits = self.compute_logits(states)
            if self.ranks is None or not self.ranks.rank:  # only rank 0 samples
                self._sample(verification, firsts, states, logits, rows)
        if self.ranks is not None:
            self._broadcast(self.ranks, verification, rows)
        drafts.followed = verification.followed
        is_finite = hidden.isfinite().all(-1).tolist()
        for row, (request, ids) in enumerate(zip(rows.requests, proposed, strict=True)):
            drafts.accepted[request.uid] = ids[: verification.counts[row]]
            if ids and not is_finite[row]:  # of a rejected draft; attention multiplies its keys and values by 0
                self.kv_pool.clean(self.table.pages(request.uid))
        return verification.final

    def _sample(
        self, verification: Verification, firsts: dict[int, int], hidden: Tensor, logits: Tensor, rows: SampledRows
    ) -> None:
        """Sample a group of the rows until no position is left.

        firsts: the rows of the group -> index of their first position. hidden: [N, D]. logits: [N, V].
        """
        verification.active = [*firsts]
        while verification.active:
            entries = verification.entries()
            offsets = np.array([count for _, count in entries], dtype=np.int64)
            entry_rows = rows.part(np.array([row for row, _ in entries], dtype=np.int64), offsets)
            chosen = self.table.upload(np.array([firsts[row] for row, _ in entries], dtype=np.int64) + offsets)
            scores = logits[chosen]
            token_ids = self.sampler.sample(scores, entry_rows)
            kept = verification.take(entries, token_ids.tolist())
            self._keep(hidden[chosen], scores, token_ids, entry_rows, np.array([*kept.values()], dtype=np.int64))
            for row in verification.active.copy():
                constraint = rows.requests[row].constraint
                if constraint is not None:
                    constraint.advance(verification.final[row])
                    if constraint.is_over:
                        verification.stop(row)
        for row in verification.followed:  # no failed row: its last token is an accepted draft
            self.errors.pop(rows.requests[row].uid, None)

    def _keep(self, hidden: Tensor, logits: Tensor, token_ids: Tensor, entries: SampledRows, kept: Ints64) -> None:
        """Store the tokens of the entries ``kept`` [N], with their logprobs and hidden states.

        hidden: [X, D]. logits: [X, V]. token_ids: [X], sampled for the X ``entries``.
        """
        rows, indices = entries.part(kept), self.table.upload(kept)
        if self.table.num_with_hidden_states:
            self.hidden_states.add_sampled(hidden[indices], rows)
        if self.table.num_with_logprobs:
            self.logprobs.add_sampled(logits[indices], rows, token_ids[indices])
        self.table.write_tokens(rows, token_ids[indices])

    def _broadcast(self, ranks: RankGroup, verification: Verification, rows: SampledRows) -> None:
        """Send the results of rank 0 to the other ranks, whose ``verification`` has none."""
        results = torch.tensor([verification.final, verification.counts], device=self.table.last_tokens.device)
        final, counts = ranks.broadcast(results)
        if ranks.rank:
            self.table.write_tokens(rows, final)
            verification.final, verification.counts = final.tolist(), counts.tolist()


def must_sample_one_by_one(requests: list[RequestRow], records: npt.NDArray[np.void]) -> list[bool]:
    """Return whether each row [S] must sample one position after the other, see ``Verification``.

    records: [S] of SAMPLING_RECORD.
    """
    has_processors = (records["processors"] != 0).tolist()
    return [
        is_processed or request.logprobs is not None or bool(request.sampling.hidden_states)
        for is_processed, request in zip(has_processors, requests, strict=True)
    ]
