"""The drafts of a step: proposes them before the step, and keeps the tokens of open requests for it.

The scheduler plans how many drafts a row may have, and assumes that all are accepted. The runner proposes up to this
number. It computes the row with the proposed tokens like a part of a prompt, and samples a token at each position: the
first drafts that equal these tokens are accepted. Without proposals, the row is a plain row.

Proposals need all earlier tokens on the host. So before a step with drafts, the host waits for the steps in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.protocol.messages import RequestKind
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.draft_model import DraftedRequest, Proposal
from aioengine.runner.speculation.ngram import NgramProposer
from aioengine.runner.ticket import OpenDrafts, StepDrafts, Ticket
from aioengine.scheduler.plan import NewRow, Row

if TYPE_CHECKING:
    from aioengine.runner.request_row import RequestRow
    from aioengine.runner.speculation.draft_model import DraftModel


class DraftRows:
    """The open requests, as far as drafts are concerned."""

    def __init__(
        self, requests: dict[int, RequestRow], model: DraftModel | None = None, *, with_grammars: bool
    ) -> None:
        """model: None: drafts are n-grams.
        with_grammars: propose drafts for requests with a grammar. Not with several steps in flight, because a row in
        flight may then sample a forced token again.
        """
        self._requests = requests
        self._model = model
        self._with_grammars = with_grammars
        self._open: dict[int, OpenDrafts] = {}
        self._launched: list[Ticket] = []  # steps whose tokens are not in ``NgramProposer.token_ids``

    def open(self, opened: NewRow) -> None:
        """Open a request, or open it again."""
        drafted = None if self._model is None else self._model.open(opened)
        if opened.kind is RequestKind.GENERATE:
            text: NgramProposer | DraftedRequest | None = None
            if self._with_grammars or opened.sampling.grammar is None:
                text = drafted
                if self._model is None:
                    text = NgramProposer(opened.token_ids.copy(), first=opened.num_prompt if opened.embeds else 0)
            self._open[opened.uid] = OpenDrafts(text)

    def close(self, uid: int) -> None:
        """Close a request. An unknown uid is ignored."""
        self._open.pop(uid, None)
        if self._model is not None:
            self._model.close(uid)

    def propose(self, rows: list[Row]) -> tuple[list[Row], StepDrafts]:
        """Return rows with their proposed drafts as known tokens, and with exact starts. Waits for steps in flight.

        rows: of requests that have not failed.
        """
        drafts = StepDrafts()
        if self._model is not None:
            self._model.note_pages(rows)
        if any(row.num_drafts for row in rows):
            for ticket in self._launched:
                _add_tokens(ticket, ticket.values.wait())
            self._launched.clear()
            self._propose(rows, drafts)
        return [self._with_drafts(row, drafts) for row in rows], drafts

    def _propose(self, rows: list[Row], drafts: StepDrafts) -> None:
        """Set ``planned`` and ``proposed`` of the drafts of a step."""
        proposals: dict[int, Proposal] = {}
        for row in rows:
            entry = self._open.get(row.uid)
            if not row.num_drafts or entry is None:
                continue
            drafts.planned[row.uid] = row.num_drafts
            text, num_known = entry.text, row.start - entry.num_rejected + row.count - row.num_drafts
            if text is None or len(text.token_ids) != num_known:
                continue
            if isinstance(text, DraftedRequest):
                if self._model is not None and not self._model.may_propose(row):
                    continue
                proposals[row.uid] = Proposal(text, self._requests[row.uid], row.num_drafts)
            elif proposed := list(text.propose(row.num_drafts)):
                drafts.proposed[row.uid] = proposed
        if self._model is not None and proposals:
            found = zip(proposals, self._model.propose([*proposals.values()]), strict=True)
            drafts.proposed = {uid: proposed for uid, proposed in found if proposed}

    def _with_drafts(self, row: Row, drafts: StepDrafts) -> Row:
        entry = self._open.get(row.uid)
        if entry is None or not (row.num_drafts or entry.num_rejected):
            return row
        start, count, token_ids = row.start - entry.num_rejected, row.count - row.num_drafts, row.token_ids
        if entry.text is not None and (proposed := drafts.proposed.get(row.uid)):
            token_ids = [*token_ids, *entry.text.token_ids[start + len(token_ids) :], *proposed]
            count += len(proposed)
        return Row(row.uid, start, count, row.outputs, token_ids)

    def launched(self, ticket: Ticket, rows: list[Row]) -> None:
        """Record a launched and verified step. rows: as ``propose`` returned them."""
        drafts = ticket.drafts
        assert drafts is not None
        drafts.open = [self._open.get(uid) for uid in ticket.sampled]
        for uid, entry in zip(ticket.sampled, drafts.open, strict=True):
            num_rejected = drafts.planned.get(uid, 0) - len(drafts.accepted.get(uid, ()))
            if num_rejected and entry is not None:
                drafts.rejected[uid] = num_rejected
                entry.num_rejected += num_rejected
        if self._model is not None:
            self._update_model(self._model, drafts, rows)
        self._launched.append(ticket)

    def _update_model(self, model: DraftModel, drafts: StepDrafts, rows: list[Row]) -> None:
        """Tell the draft model which drafts were accepted, and let it compute the prompts of the step."""
        prompts: list[tuple[DraftedRequest, RequestRow, int]] = []
        for row in rows:
            entry, request = self._open.get(row.uid), self._requests.get(row.uid)
            if entry is None or request is None or not isinstance(entry.text, DraftedRequest):
                continue
            if row.uid in drafts.proposed:
                model.accept(entry.text, request, len(drafts.accepted.get(row.uid, ())))
            elif len(row.token_ids) == row.count and row.start + row.count <= len(entry.text.token_ids):
                prompts.append((entry.text, request, row.start + row.count))
        model.compute(prompts)

    def collected(self, ticket: Ticket, values: list[int]) -> None:
        """Record a collected step, after its forced tokens are known. values: ``Ticket.values``."""
        if ticket in self._launched:
            _add_tokens(ticket, values)
        self.failed(ticket)
        assert ticket.drafts is not None
        for uid, entry in zip(ticket.sampled, ticket.drafts.open, strict=True):
            if entry is not None:
                entry.num_rejected -= ticket.drafts.rejected.get(uid, 0)

    def release(self) -> None:
        """Free the memory of the draft model's pool."""
        if self._model is not None:
            self._model.release()

    def failed(self, ticket: Ticket) -> None:
        """Forget a step without tokens."""
        self._launched = [other for other in self._launched if other is not ticket]


def _add_tokens(ticket: Ticket, values: list[int]) -> None:
    """Add the new tokens of a step to the proposers of its requests. values: ``Ticket.values``."""
    drafts = ticket.drafts
    assert drafts is not None
    for uid, entry, value in zip(ticket.sampled, drafts.open, values, strict=False):
        if entry is not None and entry.text is not None and value != FAILED and uid not in ticket.repeated:
            entry.text.token_ids += (*drafts.accepted.get(uid, ()), value, *ticket.forced.get(uid, ()))
