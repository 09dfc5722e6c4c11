"""Proposes the drafts of a step: the draft model samples them, or the scheduler has looked up n-grams.

The runner computes a row with its proposed drafts like a part of a prompt. Without proposals, the row is a plain row.

If a draft model or head has CUDA graphs, its drafts stay on the device, and the host reads them together with the
tokens of the step. Otherwise, and if the step itself cannot verify them in a CUDA graph, the host reads them before the
step.

With overlap, a step may be launched while the host knows neither the tokens of the step in flight nor how many of its
drafts are accepted:

1. The plan assumes that all drafts are accepted, so the position of a row after drafts is an upper bound.
2. ``Proposer.propose`` marks such rows (``RowTable.is_upper_bound``), and rows whose newest token only the device has
   (``RowTable.is_unread``).
3. A draft model first computes all tokens that the step in flight may sample (``DraftPlan.num_unknown``), and the
   device samples its first draft after the last accepted one. N-grams are looked up without the tokens in flight
   (``NgramProposer.propose``).
4. At the end of a step with drafts, the device accepts drafts, and stores how many it has rejected
   (``RowTable.rejected``). The graph of the next step subtracts this number from positions, slots and lengths
   (``kernels.triton.drafts``).
5. When the host reads the step, it accepts the same drafts. Until the scheduler has the result, its positions are too
   high by ``DraftedRequest.num_rejected``.

If the graphs cannot do this (``DecodeGraphs.may_overlap``), the host waits for the step in flight before it proposes.
N-grams that do not follow the token of this step are then left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from aioengine.protocol.messages import RequestKind
from aioengine.runner.request_row import RequestRow
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.draft_model import DraftedRequest, DraftModel, DraftPlan
from aioengine.runner.speculation.step_drafts import NO_DRAFTS, StepDrafts
from aioengine.runner.ticket import Ticket
from aioengine.scheduler.plan import NewRow, Row


class Proposer:
    """Proposes the drafts of a step, and keeps the tokens of the open requests for it."""

    def __init__(self, table: RowTable, model: DraftModel | None = None, *, with_grammars: bool) -> None:
        """model: None if drafts are n-grams.
        with_grammars: the draft model also proposes drafts for requests with a grammar. With several steps in flight it
        cannot, because a row in flight may sample a forced token again.
        """
        self._table = table
        self._model = model
        self._with_grammars = with_grammars
        self._open: dict[int, DraftedRequest] = {}
        self._in_flight: list[Ticket] = []  # launched, and not collected
        self._unread: list[Ticket] = []  # launched, and their tokens were not read
        self._max_tokens = sys.maxsize  # with drafts, a step does not become larger than the largest CUDA graph

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Open a request, or open it again."""
        drafted: DraftedRequest | None = None
        if opened.kind is RequestKind.GENERATE:
            drafted = self._open[opened.uid] = DraftedRequest(request)
        if self._model is not None:
            is_allowed = self._with_grammars or opened.sampling.grammar is None
            self._model.open(opened, drafted if is_allowed else None)

    def close(self, uid: int) -> None:
        """Close a request. An unknown uid is ignored."""
        self._open.pop(uid, None)
        if self._model is not None:
            self._model.close(uid)

    def capture_graphs(self, vocab_size: int, max_rows: int, report: Callable[[int, int], None]) -> None:
        """Propose drafts for steps of up to ``max_rows`` tokens. See ``DraftModel.capture_graphs``."""
        self._max_tokens = max_rows
        if self._model is not None:
            self._model.capture_graphs(vocab_size, max_rows, report)

    def is_plain_step(self, rows: list[Row]) -> bool:
        """Return whether these rows are computed as in an engine without drafts: they have none, and no draft before
        them is in flight.
        """
        if self._model is not None or any(row.num_drafts for row in rows):
            return False
        return not self._table.is_unread.any() and not any(ticket.drafts.planned for ticket in self._in_flight)

    def propose(self, rows: list[Row], *, may_overlap: bool) -> StepDrafts:
        """Return the drafts of these rows, whose requests have not failed. May wait for steps in flight.

        may_overlap: the rows can be computed before the host knows their positions.
        """
        if self._model is not None:
            self._model.note_pages(rows)
        with_drafts = [row for row in rows if row.num_drafts]
        newest = self._follow_or_wait(with_drafts, may_overlap=may_overlap)
        drafts = StepDrafts({row.uid: row.num_drafts for row in with_drafts})
        if with_drafts:
            budget = self._max_tokens - sum(row.count - row.num_drafts for row in rows)
            if budget < 0:  # no graph is large enough, even without drafts
                budget = sys.maxsize
            self._set_proposed(drafts, with_drafts, budget, newest)
        drafts.rows = [self._exact_row(row, drafts) for row in rows]
        return drafts

    def read(self, drafts: StepDrafts, rows: list[Row]) -> None:
        """Wait for drafts that are only on the device. rows: as in ``propose``."""
        drafts.read()
        drafts.rows = [self._exact_row(row, drafts) for row in rows]

    def launched(self, ticket: Ticket) -> None:
        """Record a launched step, and let the draft model compute its prompts."""
        drafts = ticket.drafts
        self._in_flight.append(ticket)
        self._unread.append(ticket)
        if drafts is NO_DRAFTS:
            return
        drafts.drafted = [self._open.get(uid) for uid in ticket.sampled]
        if not drafts.proposed:  # otherwise they are counted when the tokens are known
            _count_rejected(ticket)
        if self._model is None:
            return
        prompts: list[tuple[DraftedRequest, int]] = []
        for row in drafts.rows:
            drafted, end = self._open.get(row.uid), row.start + row.count
            if drafted is None or row.uid in drafts.proposed:
                continue
            if len(row.token_ids) == row.count and end <= len(drafted.token_ids):
                prompts.append((drafted, end))
        self._model.compute(prompts)

    def collected(self, ticket: Ticket, values: list[int]) -> None:
        """Record a collected step, after its forced tokens are known. values: ``Ticket.values``."""
        if ticket in self._unread:
            self._note_tokens(ticket, values)
        self.forget(ticket)
        if ticket.drafts.rejected:
            for uid, drafted in zip(ticket.sampled, ticket.drafts.drafted, strict=True):
                if drafted is not None:
                    drafted.num_rejected -= ticket.drafts.rejected.get(uid, 0)

    def forget(self, ticket: Ticket) -> None:
        """Forget a step that is collected, or whose tokens will never be known."""
        for tickets in (self._in_flight, self._unread):
            if ticket in tickets:
                tickets.remove(ticket)

    def _follow_or_wait(self, rows: list[Row], *, may_overlap: bool) -> dict[int, int]:
        """Let rows with planned drafts follow the step in flight without its tokens: mark the rows that it samples.

        If this is not possible, and the drafts or positions depend on the steps in flight, wait for these steps, and
        return uid -> the newest token of each of their rows. Otherwise return {}.
        """
        table = self._table
        table.is_unread[:] = table.is_upper_bound[:] = False
        if may_overlap and self._can_follow(rows):
            (ticket,) = self._unread
            sampled = [table.requests[uid].row_index for uid in ticket.sampled if uid in table.requests]
            table.is_unread[sampled] = True
            table.is_upper_bound[sampled] = ticket.drafts.accepts_on_device
        elif any(ticket.drafts.proposed for ticket in self._unread) or self._may_get_drafts(rows):
            return self._read_all()
        return {}

    def _can_follow(self, rows: list[Row]) -> bool:
        """Return whether the drafts of these rows can follow the step in flight before its tokens are known.

        With a draft model, all rows must have been in this step, and the draft model must be able to compute their
        missing tokens in a graph. Also records the tokens that the draft model has computed in this step.
        """
        if len(self._unread) != 1:
            return False
        (ticket,) = self._unread
        if self._model is None:
            return ticket.drafts.accepts_on_device or not ticket.drafts.proposed
        if not ticket.drafts.accepts_on_device or len(rows) * (1 + self._table.max_drafts) > self._max_tokens:
            return False
        launched = dict(zip(ticket.sampled, ticket.drafts.drafted, strict=True))
        for row in rows:
            drafted = self._open[row.uid]
            if launched.get(row.uid) is not drafted or not drafted.max_length:
                return False
            if row.uid in ticket.drafts.proposed:  # its drafts in flight follow all tokens that are known now
                self._model.note_computed(drafted)
            if not self._model.can_follow(drafted, _num_unknown(row, drafted)):
                return False
        return True

    def _may_get_drafts(self, rows: list[Row]) -> bool:
        """Return whether some of these rows may get drafts when all tokens before them are known."""
        return any(self._model is None or self._open[row.uid].max_length for row in rows)

    def _read_all(self) -> dict[int, int]:
        """Wait for all steps in flight. Return uid -> the newest token."""
        newest: dict[int, int] = {}
        for ticket in self._unread:
            values = ticket.values.wait()
            self._note_tokens(ticket, values)
            newest |= zip(ticket.sampled, values, strict=False)
        self._unread.clear()
        return newest

    def _note_tokens(self, ticket: Ticket, values: list[int]) -> None:
        """Record the tokens of a step, and which drafts were accepted. values: ``Ticket.values``."""
        drafts = ticket.drafts
        if drafts.proposed:
            _count_rejected(ticket)
        if self._model is None:
            return
        for uid, drafted, value in zip(ticket.sampled, drafts.drafted, values, strict=False):
            if drafted is None or not drafted.max_length:
                continue
            accepted = drafts.accepted.get(uid, ())
            if uid in drafts.proposed and self._open.get(uid) is drafted:
                self._model.note_accepted(drafted, len(drafts.proposed[uid]), len(accepted))
            if value != FAILED and uid not in ticket.repeated:
                drafted.token_ids += (*accepted, value, *ticket.forced.get(uid, ()))

    def _set_proposed(self, drafts: StepDrafts, rows: list[Row], budget: int, newest: dict[int, int]) -> None:
        """Set the proposed drafts of rows with planned drafts.

        budget: maximum number of drafts. newest: uid -> the newest token of a row that was in flight.
        """
        chosen: list[Row] = []
        for row in rows:
            if row.num_drafts > budget:
                break
            if self._may_propose(row, newest):
                chosen.append(row)
                budget -= row.num_drafts
        if self._model is None:
            drafts.proposed = {row.uid: row.drafts for row in chosen}
            return
        drafted_rows = [(row, self._open[row.uid]) for row in chosen]
        plans = [DraftPlan(drafted, row.num_drafts, _num_unknown(row, drafted)) for row, drafted in drafted_rows]
        if (on_device := self._model.propose(plans)) is not None:
            drafts.on_device = on_device
            drafts.proposed = {plan.drafted.row.uid: [0] * plan.count for plan in on_device.plans}
            if not on_device.is_stored:
                drafts.read()

    def _may_propose(self, row: Row, newest: dict[int, int]) -> bool:
        """Return whether the planned drafts of a row can be proposed now. newest: as in ``_set_proposed``."""
        if self._model is None:  # the n-gram must follow the newest token
            return newest.get(row.uid, row.expected_id) == row.expected_id
        drafted = self._open[row.uid]
        if not drafted.max_length or not self._model.can_propose(row):
            return False
        return not _num_unknown(row, drafted) or bool(self._table.is_unread[drafted.row.row_index])

    def _exact_row(self, row: Row, drafts: StepDrafts) -> Row:
        """Return a planned row with its proposed drafts as known tokens, and with an exact start."""
        drafted = self._open.get(row.uid)
        if drafted is None or not (row.num_drafts or drafted.num_rejected):
            return row
        start, count, token_ids = row.start - drafted.num_rejected, row.count - row.num_drafts, row.token_ids
        if proposed := drafts.proposed.get(row.uid, []):
            if row.drafts:
                known = token_ids or [row.expected_id]
            else:
                known = [*token_ids, *drafted.token_ids[start + len(token_ids) :]]
            token_ids = [*known, *[0] * (count - len(known)), *proposed]  # the device has the unknown token
            count += len(proposed)
        return Row(row.uid, start, count, row.outputs, token_ids, row.new_pages, len(proposed))


class ReceivedDrafts(Proposer):
    """The drafts of a rank above 0. Rank 0 proposes them, and sends them in the rows of the plan."""

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Do nothing, because this rank proposes no drafts."""

    def propose(self, rows: list[Row], *, may_overlap: bool) -> StepDrafts:
        """Return the drafts that the rows contain."""
        proposed = {row.uid: row.token_ids[-row.num_drafts :] for row in rows if row.num_drafts}
        return StepDrafts(proposed=proposed, rows=rows)


def _num_unknown(row: Row, drafted: DraftedRequest) -> int:
    """Return how many tokens before the drafts of a row only the device knows."""
    return row.start - drafted.num_rejected + row.count - row.num_drafts - len(drafted.token_ids)


def _count_rejected(ticket: Ticket) -> None:
    """Count the planned drafts of each row of a step that were not proposed or not accepted."""
    drafts = ticket.drafts
    for uid, drafted in zip(ticket.sampled, drafts.drafted, strict=True):
        num_rejected = drafts.planned.get(uid, 0) - len(drafts.accepted.get(uid, ()))
        if num_rejected and drafted is not None:
            drafts.rejected[uid] = num_rejected
            drafted.num_rejected += num_rejected
