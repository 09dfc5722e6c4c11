"""The drafts of a step: a draft model proposes them before the step, or the scheduler has looked up n-grams.

The scheduler plans how many drafts a row may have, and assumes that all are accepted. The runner proposes up to this
number. It computes the row with the proposed tokens like a part of a prompt, and samples a token at each position: the
first drafts that equal these tokens are accepted. Without proposals, the row is a plain row.

If a draft model or head has CUDA graphs, its drafts stay on the device, and the host reads them together with the
tokens of the step. Otherwise, and if the step itself cannot verify them in a CUDA graph, the host reads them before the
step.

With overlap, a step may be launched while the host knows neither the tokens of the step in flight nor how many of its
drafts are accepted:

1. The plan assumes that all drafts are accepted, so the position of a row after drafts is an upper bound.
2. ``Proposer.propose`` marks such rows (``RowTable.is_upper_bound``), and rows whose newest token only the device has
   (``RowTable.is_unread``).
3. A draft model first computes all tokens that the step in flight may sample (``PlannedDrafts.num_unknown``), and the
   device samples its first draft after the last accepted one. N-grams are looked up without the tokens in flight
   (``NgramProposer.propose``).
4. At the end of a step with drafts, the device accepts drafts, and stores how many it has rejected
   (``RowTable.rejected``). The graph of the next step subtracts this number from positions, slots and lengths
   (``kernels.triton.drafts``).
5. When the host reads the step, it accepts the same drafts. Until the scheduler has the result, its positions are too
   high by ``OpenDrafts.num_rejected``.

If the graphs cannot do this (``DecodeGraphs.may_overlap``), the host waits for the step in flight before it proposes.
N-grams that do not follow the token of this step are then left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from msgspec.structs import replace

from aioengine.protocol.messages import RequestKind
from aioengine.runner.request_row import RequestRow
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.draft_model import DraftedRequest, DraftModel, PlannedDrafts
from aioengine.runner.ticket import NO_DRAFTS, OpenDrafts, StepDrafts, Ticket
from aioengine.scheduler.plan import NewRow, Row


class Proposer:
    """Proposes the drafts of a step, and keeps the tokens of the open requests for it."""

    def __init__(self, table: RowTable, model: DraftModel | None = None, *, with_grammars: bool) -> None:
        """model: None if drafts are n-grams.
        with_grammars: the model proposes drafts for requests with a grammar. Not with several steps in flight, because
        a row in flight may then sample a forced token again.
        """
        self._table = table
        self._requests = table.requests
        self._model = model
        self._with_grammars = with_grammars
        self._open: dict[int, OpenDrafts] = {}
        self._launched: list[Ticket] = []  # steps whose tokens are not recorded
        self._num_planned = 0  # steps with planned drafts that are not collected
        self._has_marks = False  # ``RowTable.is_unread`` is set
        self._max_tokens = sys.maxsize  # with drafts, a step does not become larger than the largest CUDA graph

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Open a request, or open it again."""
        drafted = None if self._model is None else self._model.open(opened, request)
        if opened.kind is RequestKind.GENERATE:
            is_allowed = self._with_grammars or opened.sampling.grammar is None
            self._open[opened.uid] = OpenDrafts(drafted if is_allowed else None)

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

    def has_no_drafts(self, rows: list[Row]) -> bool:
        """Return whether these rows are computed as in an engine without drafts: they have none, and no draft before
        them is in flight.
        """
        is_exact = self._model is None and not self._num_planned and not self._has_marks
        return is_exact and not any(row.num_drafts for row in rows)

    def propose(self, rows: list[Row], *, may_overlap: bool) -> StepDrafts:
        """Return the drafts of these rows, whose requests have not failed. May wait for steps in flight.

        may_overlap: the rows can be computed before the host knows their positions.
        """
        drafts = StepDrafts()
        if self._model is not None:
            self._model.note_pages(rows)
        drafted = [row for row in rows if row.num_drafts]
        self._table.is_unread[:] = self._table.is_upper_bound[:] = self._has_marks = False
        newest: dict[int, int] = {}
        if may_overlap and self._can_follow(drafted):
            (ticket,) = self._launched
            sampled = [self._requests[uid].row_index for uid in ticket.sampled if uid in self._requests]
            self._table.is_unread[sampled] = self._has_marks = True
            self._table.is_upper_bound[sampled] = ticket.drafts.is_counted
        elif any(ticket.drafts.proposed for ticket in self._launched) or any(map(self._may_get_drafts, drafted)):
            newest = self._record_launched()
        drafts.planned = {row.uid: row.num_drafts for row in drafted if row.uid in self._open}
        if drafted:
            left = self._max_tokens - sum(row.count - row.num_drafts for row in rows)
            if left < 0:  # no graph is large enough, even without drafts
                left = sys.maxsize
            self._propose(drafted, drafts, left, newest)
        return drafts

    def _can_follow(self, rows: list[Row]) -> bool:
        """Return whether the drafts of these rows can follow the step in flight before its tokens are known.

        With a draft model, all rows must have been in this step, and it must be able to compute the missing tokens in a
        graph.
        """
        if len(self._launched) != 1:
            return False
        (ticket,) = self._launched
        if self._model is None:
            return ticket.drafts.is_counted or not ticket.drafts.proposed
        if not ticket.drafts.is_counted or len(rows) * (1 + self._table.max_drafts) > self._max_tokens:
            return False
        launched = dict(zip(ticket.sampled, ticket.drafts.open, strict=True))
        for row in rows:
            entry = launched.get(row.uid)
            if entry is None or self._open.get(row.uid) is not entry or entry.drafted is None:
                return False
            if row.uid in ticket.drafts.proposed:  # its drafts in flight follow all tokens that are known now
                self._model.catch_up(entry.drafted)
            if not self._model.can_follow(entry.drafted, _num_unknown(row, entry)):
                return False
        return True

    def _record_launched(self) -> dict[int, int]:
        """Wait for all steps in flight. Return uid -> the newest token."""
        newest: dict[int, int] = {}
        for ticket in self._launched:
            values = ticket.values.wait()
            self._record(ticket, values)
            newest |= zip(ticket.sampled, values, strict=False)
        self._launched.clear()
        return newest

    def _may_get_drafts(self, row: Row) -> bool:
        """Return whether a row may get drafts when all tokens before them are known."""
        entry = self._open.get(row.uid)
        return entry is not None and (self._model is None or entry.drafted is not None)

    def with_drafts(self, rows: list[Row], drafts: StepDrafts) -> list[Row]:
        """Return the rows of ``propose`` with their proposed drafts as known tokens, and with exact starts."""
        return [self._with_drafts(row, drafts) for row in rows]

    def read(self, drafts: StepDrafts, token_ids: list[int] | None = None) -> None:
        """Set the drafts that are only on the device. token_ids: these drafts; None: wait for them."""
        if (on_device := drafts.on_device) is not None:
            assert self._model is not None
            token_ids = on_device.token_ids.tolist() if token_ids is None else token_ids
            drafts.proposed = self._model.by_request(on_device, token_ids)
            drafts.on_device = None

    def _propose(self, rows: list[Row], drafts: StepDrafts, left: int, newest: dict[int, int]) -> None:
        """Set ``proposed`` of the drafts of a step.

        left: maximum number of drafts. newest: uid -> the newest token of a row that was in flight.
        """
        planned: list[PlannedDrafts] = []
        for row in rows:
            if row.num_drafts > left:
                break
            entry = self._open.get(row.uid)
            if self._model is None:
                if entry is not None and newest.get(row.uid, row.expected_id) == row.expected_id:
                    drafts.proposed[row.uid] = row.drafts
                    left -= row.num_drafts
                continue
            if entry is None or entry.drafted is None or not self._model.can_propose(row):
                continue
            num_unknown = _num_unknown(row, entry)
            if not num_unknown or self._table.is_unread[self._requests[row.uid].row_index]:
                planned.append(PlannedDrafts(entry.drafted, row.num_drafts, num_unknown))
                left -= row.num_drafts
        if self._model is not None and (on_device := self._model.propose(planned)) is not None:
            drafts.on_device = on_device
            drafts.proposed = {one.drafted.row.uid: [0] * one.count for one in on_device.planned}
            if not on_device.is_stored:
                self.read(drafts)

    def _with_drafts(self, row: Row, drafts: StepDrafts) -> Row:
        entry = self._open.get(row.uid)
        if entry is None or not (row.num_drafts or entry.num_rejected):
            return row
        start, count, token_ids = row.start - entry.num_rejected, row.count - row.num_drafts, row.token_ids
        if proposed := drafts.proposed.get(row.uid):
            if entry.drafted is None:
                known = token_ids or [row.expected_id]
            else:
                known = [*token_ids, *entry.drafted.token_ids[start + len(token_ids) :]]
            token_ids = [*known, *[0] * (count - len(known)), *proposed]  # the device has the unknown token
            count += len(proposed)
        return Row(row.uid, start, count, row.outputs, token_ids)

    def launched(self, ticket: Ticket, rows: list[Row]) -> None:
        """Record a launched step, and let the draft model compute its prompts. rows: of ``with_drafts``."""
        drafts = ticket.drafts
        self._launched.append(ticket)
        if drafts is NO_DRAFTS:
            return
        self._num_planned += bool(drafts.planned)
        drafts.open = [self._open.get(uid) for uid in ticket.sampled]
        if not drafts.proposed:  # otherwise they are rejected when the tokens are known
            _reject(ticket, drafts)
        if self._model is None:
            return
        prompts: list[tuple[DraftedRequest, int]] = []
        for row in rows:
            entry = self._open.get(row.uid)
            if entry is None or entry.drafted is None:
                continue
            is_known = len(row.token_ids) == row.count and row.start + row.count <= len(entry.drafted.token_ids)
            if is_known and row.uid not in drafts.proposed:
                prompts.append((entry.drafted, row.start + row.count))
        self._model.compute(prompts)

    def _record(self, ticket: Ticket, values: list[int]) -> None:
        """Record the tokens of a step, and which drafts were accepted. values: ``Ticket.values``."""
        drafts = ticket.drafts
        if drafts.proposed:
            _reject(ticket, drafts)
        if self._model is None:
            return
        for uid, entry, value in zip(ticket.sampled, drafts.open, values, strict=False):
            if entry is None or entry.drafted is None:
                continue
            accepted = drafts.accepted.get(uid, ())
            if uid in drafts.proposed and self._open.get(uid) is entry:
                self._model.accept(entry.drafted, len(drafts.proposed[uid]), len(accepted))
            if value != FAILED and uid not in ticket.repeated:
                entry.drafted.token_ids += (*accepted, value, *ticket.forced.get(uid, ()))

    def collected(self, ticket: Ticket, values: list[int]) -> None:
        """Record a collected step, after its forced tokens are known. values: ``Ticket.values``."""
        if ticket in self._launched:
            self._record(ticket, values)
        self.forget(ticket)
        if ticket.drafts.rejected:
            for uid, entry in zip(ticket.sampled, ticket.drafts.open, strict=True):
                if entry is not None:
                    entry.num_rejected -= ticket.drafts.rejected.get(uid, 0)

    def forget(self, ticket: Ticket) -> None:
        """Forget a step that is collected, or whose tokens will never be known."""
        self._num_planned -= bool(ticket.drafts.planned)
        if ticket in self._launched:
            self._launched.remove(ticket)


class ReceivedDrafts(Proposer):
    """The drafts of a rank above 0. Rank 0 proposes them, and sends them in the rows of the plan."""

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Do nothing, because this rank proposes no drafts."""

    def propose(self, rows: list[Row], *, may_overlap: bool) -> StepDrafts:
        """Return the drafts that the rows contain."""
        return StepDrafts(proposed={row.uid: row.token_ids[-row.num_drafts :] for row in rows if row.num_drafts})

    def with_drafts(self, rows: list[Row], drafts: StepDrafts) -> list[Row]:
        """Return the rows unchanged, because they have their drafts already."""
        return rows


def rows_with_drafts(rows: list[Row], drafted: list[Row], drafts: StepDrafts) -> list[Row]:
    """Return the rows for ``ReceivedDrafts``. rows: of the plan. drafted: as ``Proposer.with_drafts`` returns them."""
    new_pages = {row.uid: row.new_pages for row in rows}
    return [
        replace(row, new_pages=new_pages[row.uid], num_drafts=len(drafts.proposed.get(row.uid, ()))) for row in drafted
    ]


def _num_unknown(row: Row, entry: OpenDrafts) -> int:
    """Return how many tokens before the drafts of a row only the device knows. The draft model has its other tokens."""
    assert entry.drafted is not None
    return row.start - entry.num_rejected + row.count - row.num_drafts - len(entry.drafted.token_ids)


def _reject(ticket: Ticket, drafts: StepDrafts) -> None:
    """Set the number of rejected drafts of each row of a step."""
    for uid, entry in zip(ticket.sampled, drafts.open, strict=True):
        num_rejected = drafts.planned.get(uid, 0) - len(drafts.accepted.get(uid, ()))
        if num_rejected and entry is not None:
            drafts.rejected[uid] = num_rejected
            entry.num_rejected += num_rejected
