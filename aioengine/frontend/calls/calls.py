"""Calls: opens, starts, aborts, expires, fails and closes the calls of an engine.

Everything runs on the engine's loop and never waits. Only ``Calls.open`` runs on any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Final

from aioengine.errors import EngineError
from aioengine.frontend.calls.call import Call, CallRow, NotifyOn, ReadPosition, UnstartedEnd
from aioengine.frontend.calls.call_ids import CallIds
from aioengine.frontend.calls.delivery import Delivery
from aioengine.frontend.calls.finished import RecordedRequest, recorded_request
from aioengine.frontend.calls.overload import QueueLimits
from aioengine.frontend.intake.request_checks import RequestChecks
from aioengine.frontend.intake.submitter import Submitter
from aioengine.frontend.sessions.attachments import Attachments
from aioengine.frontend.sessions.sessions import Sessions
from aioengine.protocol.messages import Abort, End, FinishCode, Resume, Suspend
from aioengine.supervision.ledger import NUM_FINISHED
from aioengine.supervision.tasks import post

GRACE_S: Final = 0.5
"""The frontend ends a request this long after its deadline, if the scheduler has not ended it."""

MAX_ROWS_FREED_AT_ONCE: Final = 4096
"""Unread rows that are freed in one iteration of the loop."""


class Calls:
    """The open calls and their rows.

    Attributes:
        opened: the open calls, in order. num_opened: number of calls that were ever opened.
        rows: submitted rows without an end, by uid.
        step_ended_at: when the last known step of the scheduler ended.
        idle: set when a call ended and none is open.
        finished: the last finished requests, for ``selfcheck``.
    """

    def __init__(self, checks: RequestChecks, lock: threading.RLock, limits: QueueLimits, sessions: Sessions) -> None:
        self.opened: dict[Call, None] = {}
        self.num_opened = 0
        self.step_ended_at = 0.0
        self.rows: dict[int, CallRow] = {}
        self.ids = CallIds()
        self.idle = asyncio.Event()
        self.finished: deque[RecordedRequest] = deque(maxlen=NUM_FINISHED)
        self.delivery = Delivery(self.rows, lock, self.row_ended)
        self.attachments = Attachments(self.ids, lock=lock, close_if_over=self.close_if_over)
        self.submitter = Submitter(checks, self.ids, self.rows, lock, limits, sessions, self.close_if_over)
        self._loop = asyncio.get_running_loop()
        self._lock = lock
        self._limits = limits
        self._sessions = sessions
        self._images = checks.images
        self._processes = checks.parts.processes
        self._send = self._processes.send

    def open(self, call: Call) -> None:
        """Register a call whose request is checked. From any thread, under the lock.

        Raises:
            ValueError: an id is in use.
            EngineError: the engine accepts no calls any more.
        """
        self._limits.add_bytes(call.reservation, call.request.num_bytes)
        self.ids.add(call)
        self.num_opened += 1
        call.number = self.num_opened
        self.opened[call] = None
        if call.is_attachable:
            self.attachments.add(call)

    def start(self, call: Call) -> None:
        """Submit the first rows of a call."""
        if call not in self.opened:
            return  # another thread ended it before it was started
        if call.deadlines:
            self._set_timer(call, call.called_at)
        if call.request.num_registered < call.request.num_prompts:
            self.submitter.check_rest(call)
        self.submitter.submit_next(call)
        if call.is_over:  # a batch of nothing
            self.close_if_over(call)

    def on_read(self, call: Call) -> None:
        """A reader has read: start more rows of the call, and resume suspended ones."""
        if call.is_attachable:
            self.attachments.on_read(call)
        if call in self.opened:
            if call.notify_on is NotifyOn.EACH_READ:
                with self._lock:
                    call.notify_on = NotifyOn.NOTHING
                    uids = [row.uid for row in call.open_rows.values()]
                self._send([Resume(uids)])
            self.submitter.submit_next(call)

    def suspend(self, call: Call, position: ReadPosition) -> None:
        """Stop computing the rows of a call until its reader, which is at ``position``, reads again.

        Does nothing if the reader has read meanwhile: only unread output can resume a suspended request.
        """
        with self._lock:
            if call.read_position != position:
                return
            call.notify_on = NotifyOn.EACH_READ
            uids = [row.uid for row in call.open_rows.values()]
        self._send([Suspend(uids)])

    def row_ended(self, row: CallRow) -> None:
        """The processes ended a row: its call is over, or may start more rows."""
        call = row.call
        if call not in self.opened:
            return
        output_ids = self._processes.finished_ids(row.uid)
        if output_ids and (finished := recorded_request(row, output_ids)) is not None:
            self.finished.append(finished)
        if call.is_over:
            self.close_if_over(call)
            return
        with self._lock:
            self._free_row(row, time.monotonic())
        if call.notify_on:
            self.submitter.submit_next(call)

    def _free_row(self, row: CallRow, now: float) -> None:
        """Free what an ended row has reserved, while its call continues: memory, images, its part of the queue limits.

        Its output may still be unread, so the logprobs of its tokens stay counted.
        """
        call, prompt_index, num_prompt_tokens = row.call, row.prompt_index, len(row.prompt_token_ids)
        if (rules := call.request.logprobs_of(prompt_index)) is not None:
            num_positions = rules.num_prompt_positions(num_prompt_tokens) + max(1, row.num_output)
            row.keep_logprobs(0 if row.error else rules.position_bytes * num_positions)
        if self._images is not None:
            self._images.row_ended(call, prompt_index)
        self._limits.end_row(call.reservation, prompt_index, num_prompt_tokens, now)

    def close_if_over(self, call: Call) -> None:
        """If a call is over, close it and free its remaining rows."""
        with self._lock:
            if not call.is_over:
                return
            request, now = call.request, time.monotonic()
            uids = call.drop_open_rows(now) if call.open_rows else ()
            for uid in uids:
                self.rows.pop(uid, None)
            if request.sessions is not None:
                self._sessions.end(call)
            if request.adapters is not None:
                request.adapters.leave()
            self.opened.pop(call, None)
            if call.timer is not None:
                call.timer.cancel()
            self._limits.release(call.reservation, now)
            if call.reservation.num_logprob_bytes and (call.is_attachable or not call.has_unread):
                call.reservation.free_logprobs()
            request.clear()
        if call.is_attachable:
            self.attachments.ended(call)
        else:
            self._free_ids(call)
        if self._images is not None:
            self._images.release(call)
        if uids:
            self._send([Abort([*uids])])
        if not self.opened:
            self.idle.set()

    def _free_ids(self, call: Call) -> None:
        """Free the ids of a call, a bounded number in each iteration of the loop."""
        with self._lock:
            if not self.ids.free(call):
                post(self._loop, self._free_ids, call)

    def discard(self, call: Call) -> None:
        """Undo the start of a call whose opening failed. It has no reader."""
        with self._lock:
            call.leave()
        self.close_if_over(call)
        self.attachments.discard(call)

    def on_left(self, call: Call, ready: deque[CallRow]) -> None:
        """A reader has left. ``ready``: its ``Reader.ready``, which identifies it."""
        with self._lock:
            if call.is_attachable:
                call.has_reader = call.has_reader and call.ready is not ready
            else:
                call.leave()
                call.reservation.free_logprobs()
            unread = list(ready)
            ready.clear()
            call.wake()
        self._free(unread)
        if call.is_attachable:
            self.on_read(call)  # it continues, even if it was suspended
        elif call in self.opened:
            self.close_if_over(call)

    def _free(self, rows: list[CallRow]) -> None:
        """Free unread rows, a bounded number in each iteration of the loop: each takes about a microsecond."""
        del rows[-MAX_ROWS_FREED_AT_ONCE:]
        if rows:
            self._loop.call_soon(self._free, rows)

    def end(self, calls: Sequence[Call], code: FinishCode, message: str = "") -> None:
        """End all rows of these calls with their output so far: the scheduler ends the submitted rows."""
        for call in calls:
            if call not in self.opened:
                continue
            with self._lock:
                uids = [row.uid for row in call.open_rows.values()]
            self.submitter.end_unstarted(call, UnstartedEnd(code))
            if uids:
                self._send([Abort(uids, code, message)])
            self.close_if_over(call)

    def abort_opened(self, num_opened: int) -> None:
        """End the open calls among the first ``num_opened`` of the engine, but no later calls."""
        self.end([call for call in self.opened if call.number <= num_opened], FinishCode.ABORT)

    def abort_named(self, rid: str, num_opened: int) -> None:
        """End the rows with this id, if they belong to the first ``num_opened`` calls of the engine."""
        with self._lock:
            named = self.ids.find(rid)
        if named is None and any(call.number <= num_opened for call in self.submitter.checking):
            # the id may belong to an unchecked row
            self.submitter.after_checks.append(partial(self.abort_named, rid, num_opened))
        if named is None or named[0].number > num_opened or named[0] not in self.opened:
            return
        call, rows = named
        if len(rows) == call.request.num_rows:
            self.end([call], FinishCode.ABORT)
            return
        call.aborted.update(index for index in rows if index >= call.num_started)
        with self._lock:
            uids = [call.open_rows[index].uid for index in rows if index in call.open_rows]
        if uids:
            self._send([Abort(uids)])

    def fail(self, call: Call, error: EngineError) -> None:
        """End a call with a copy of ``error``. If exceptions are returned in place, end each of its rows."""
        error = copy(error)
        with self._lock:
            if call.rows_fail_alone and not call.is_over:
                now = time.monotonic()
                for row in list(call.open_rows.values()):
                    end = End(row.uid, FinishCode.FAILED, stage="engine", message=str(error), ended_at=now)
                    call.end_row(row, end, now, error)
                self.submitter.end_unstarted(call, UnstartedEnd(FinishCode.FAILED, error=error))
            else:
                call.fail(error)
        self.close_if_over(call)

    # ------------------------------------------------------------ time

    def _set_timer(self, call: Call, since: float) -> None:
        """Set the timer for the first deadline, or end of the time after a deadline, after ``since``."""
        times = [when for deadline in call.deadlines.values() for when in (deadline, deadline + GRACE_S)]
        if later := [when for when in times if when > since]:
            call.timer = self._loop.call_later(max(0.0, min(later) - time.monotonic()), self._expire, call)

    def _expire(self, call: Call) -> None:
        """End the rows that were not started before a deadline.

        The scheduler ends the started rows. If it does not, ``end_here`` ends them.
        """
        now = time.monotonic()  # one reading: a deadline is either over or waited for again
        expired = call.expired_deadline(now)
        if expired is not None and call.has_unstarted:
            self.submitter.end_unstarted(call, UnstartedEnd(FinishCode.DEADLINE, matched=expired))
        for name, deadline in call.deadlines.items():
            if now >= deadline + GRACE_S:
                self.end_here(call, FinishCode.DEADLINE, name)
        self.close_if_over(call)
        if call in self.opened:
            self._set_timer(call, now)

    def end_here(self, call: Call, code: FinishCode, deadline: str | None = None) -> None:
        """End rows here, with their output so far, because the scheduler did not end them (at this deadline)."""
        self.delivery.end_rows()  # ends that have arrived
        now = time.monotonic()
        with self._lock:
            rows = [row for row in call.open_rows.values() if deadline in (None, "total") or row.first_token is None]
            if deadline == "queue" and rows:
                # The scheduler checks deadlines between steps. A row certainly waits if no step has ended since the
                # call, and the steps that run now do not compute it.
                has_stepped = self.step_ended_at > call.called_at
                computed = () if has_stepped else self._processes.uids_in_flight()
                rows = [] if has_stepped else [row for row in rows if row.uid not in computed]
            for row in rows:
                call.end_row(row, End(row.uid, code, deadline, ended_at=now), now)
                self._free_row(row, now)
        uids = [row.uid for row in rows]
        for uid in uids:
            self.rows.pop(uid, None)
        if uids:
            self._send([Abort(uids, code)])
        self.close_if_over(call)
