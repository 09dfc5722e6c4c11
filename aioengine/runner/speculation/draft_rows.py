"""The drafts of a step: proposes them before the step, and keeps the tokens of open requests for it.

The scheduler plans how many drafts a row may have, and assumes that all are accepted. The runner proposes up to this
number. It computes the row with the proposed tokens like a part of a prompt, and samples a token at each position: the
first drafts that equal these tokens are accepted. Without proposals, the row is a plain row.

Proposals need all earlier tokens on the host. So before a step with drafts, the host waits for the steps in flight.
"""

from __future__ import annotations

from aioengine.protocol.messages import RequestKind
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.ngram import NgramProposer
from aioengine.runner.ticket import OpenDrafts, StepDrafts, Ticket
from aioengine.scheduler.plan import NewRow, Row


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
