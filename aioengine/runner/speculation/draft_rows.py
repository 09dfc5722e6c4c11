"""The drafts of a step: proposes them before the step, and keeps the tokens of open requests for it.

The scheduler plans how many drafts a row may have, and assumes that all are accepted. The runner proposes up to this
number. It computes the row with the proposed tokens like a part of a prompt, and samples a token at each position: the
first drafts that equal these tokens are accepted. Without proposals, the row is a plain row.

Proposals need all earlier tokens on the host. So before a step with drafts, the host waits for the steps in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aioengine.protocol.messages import RequestKind
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.ngram import NgramProposer
from aioengine.scheduler.plan import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.request_row import RequestRow
    from aioengine.runner.ticket import Ticket
    from aioengine.runner.transfer import Ints
    from aioengine.scheduler.plan import NewRow


@dataclass(slots=True)
class OpenDrafts:
    """An open request.

    Attributes:
        proposer: None: it gets no proposals.
        num_rejected: drafts rejected in flight, which the scheduler does not know yet.
    """

    proposer: NgramProposer | None
    num_rejected: int = 0


@dataclass(slots=True)
class StepDrafts:
    """The drafts of a step.

    Attributes:
        planned: uid -> planned drafts. proposed: uid -> proposed drafts.
        accepted: uid -> accepted drafts, after the verification.
        followed: indices of sampled rows whose grammar has followed the last token of the row.
        open: the open requests of the sampled rows.
        rejected: uid -> number of rejected drafts.
    """

    planned: dict[int, int] = field(default_factory=dict[int, int])
    proposed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    accepted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    followed: set[int] = field(default_factory=set[int])
    open: list[OpenDrafts | None] = field(default_factory=list["OpenDrafts | None"])
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    def counts(self, requests: list[RequestRow]) -> Ints:
        """Return the number of proposed drafts of each request [R]."""
        return np.array([len(self.proposed.get(request.uid, ())) for request in requests], dtype=np.int64)

    def token_indices(self, rows: StepRows) -> Ints:
        """Return the indices [K] in the step of the tokens before each draft, row by row."""
        counts = self.counts(rows.requests)
        firsts = rows.token_ends - 1 - counts
        return np.concatenate(
            [np.arange(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
        )


class DraftRows:
    """The open requests, as far as drafts are concerned."""

    def __init__(self, *, with_grammars: bool) -> None:
        """with_grammars: propose drafts for requests with a grammar. Not with several steps in flight, because a row in
        flight may then sample a forced token again.
        """
        self._with_grammars = with_grammars
        self._open: dict[int, OpenDrafts] = {}
        self._launched: list[Ticket] = []  # steps whose tokens are not in ``NgramProposer.token_ids``

    def open(self, opened: NewRow) -> None:
        """Open a request, or open it again."""
        if opened.kind is RequestKind.GENERATE:
            proposer: NgramProposer | None = None
            if self._with_grammars or opened.sampling.grammar is None:
                proposer = NgramProposer(opened.token_ids.copy(), first=opened.num_prompt if opened.embeds else 0)
            self._open[opened.uid] = OpenDrafts(proposer)

    def close(self, uid: int) -> None:
        """Close a request. An unknown uid is ignored."""
        self._open.pop(uid, None)

    def propose(self, rows: list[Row]) -> tuple[list[Row], StepDrafts]:
        """Return rows with their proposed drafts as known tokens, and with exact starts. Waits for steps in flight."""
        drafts = StepDrafts()
        if any(row.num_drafts for row in rows):
            for ticket in self._launched:
                _add_tokens(ticket, ticket.values.wait())
            self._launched.clear()
        return [self._with_drafts(row, drafts) for row in rows], drafts

    def _with_drafts(self, row: Row, drafts: StepDrafts) -> Row:
        entry = self._open.get(row.uid)
        if entry is None or not (row.num_drafts or entry.num_rejected):
            return row
        start, count, token_ids = row.start - entry.num_rejected, row.count - row.num_drafts, row.token_ids
        if row.num_drafts:
            drafts.planned[row.uid] = row.num_drafts
            known = [] if entry.proposer is None else entry.proposer.token_ids
            if entry.proposer is not None and len(known) == start + count:
                proposed = list(entry.proposer.propose(row.num_drafts))
                if proposed:
                    drafts.proposed[row.uid] = proposed
                    token_ids = [*token_ids, *known[start + len(token_ids) :], *proposed]
                    count += len(proposed)
        return Row(row.uid, start, count, row.outputs, token_ids)

    def launched(self, ticket: Ticket) -> None:
        """Record a launched and verified step."""
        drafts = ticket.drafts
        assert drafts is not None
        drafts.open = [self._open.get(uid) for uid in ticket.sampled]
        for uid, entry in zip(ticket.sampled, drafts.open, strict=True):
            num_rejected = drafts.planned.get(uid, 0) - len(drafts.accepted.get(uid, ()))
            if num_rejected and entry is not None:
                drafts.rejected[uid] = num_rejected
                entry.num_rejected += num_rejected
        self._launched.append(ticket)

    def collected(self, ticket: Ticket, values: list[int]) -> None:
        """Record a collected step, after its forced tokens are known. values: ``Ticket.values``."""
        if ticket in self._launched:
            _add_tokens(ticket, values)
        self.failed(ticket)
        assert ticket.drafts is not None
        for uid, entry in zip(ticket.sampled, ticket.drafts.open, strict=True):
            if entry is not None:
                entry.num_rejected -= ticket.drafts.rejected.get(uid, 0)

    def failed(self, ticket: Ticket) -> None:
        """Forget a step without tokens."""
        self._launched = [other for other in self._launched if other is not ticket]


def _add_tokens(ticket: Ticket, values: list[int]) -> None:
    """Add the new tokens of a step to the proposers of its requests. values: ``Ticket.values``."""
    drafts = ticket.drafts
    assert drafts is not None
    for uid, entry, value in zip(ticket.sampled, drafts.open, values, strict=False):
        if entry is not None and entry.proposer is not None and value != FAILED and uid not in ticket.repeated:
            entry.proposer.token_ids += (*drafts.accepted.get(uid, ()), value, *ticket.forced.get(uid, ()))


class Verification:
    """Compares the tokens that S rows sample with their drafts.

    Some rows sample one position after the other, because a token depends on the tokens before (penalties, grammars),
    or because something is returned for it (logprobs). Other rows sample all positions at once.

    Attributes:
        counts: number of accepted drafts of each row so far.
        final: the last token of each row so far; FAILED: it cannot be sampled.
        active: the rows that are not done.
    """

    def __init__(self, drafts: Sequence[Sequence[int]], one_by_one: list[bool]) -> None:
        """drafts: of each row; may be empty."""
        self.drafts = drafts
        self.counts = [0] * len(drafts)
        self.final = [FAILED] * len(drafts)
        self.active = list(range(len(drafts)))
        self._one_by_one = one_by_one

    def round(self, max_entries: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the entries to sample next: pairs of a row and the number of drafts before the position. Call ``take``
        with the tokens of each yielded list.
        """
        active, self.active = self.active, []
        entries: list[tuple[int, int]] = []
        for row in active:
            first = self.counts[row]
            last = first if self._one_by_one[row] else len(self.drafts[row])
            if entries and len(entries) + last - first >= max_entries:
                yield entries
                entries = []
            entries += [(row, count) for count in range(first, last + 1)]
        if entries:
            yield entries

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
        """End an active row with the token of its last entry."""
        self.active.remove(row)
        self.counts[row] -= 1
