"""Ledger: what is submitted again when the processes of an engine are replaced.

Everything that the scheduler is told passes the ``Ledger``, and everything that comes of it. So it knows, for every
request that is open, what it was asked for and every id that was given out; the rest is a function of these.

A request that was in the step in which a process died is a *suspect*. After the restart the suspects go on one at a
time, beside the others that had begun; the next one when the one before has got past the place where it had been, and
what had not begun when all have. Should a process die in a step of the one on trial, that one goes on alone, with
nothing beside it; and should one die again, it was killed by this request, which ends with an error. All others go on.

A control call is tried once: one that was on its way when the scheduler died ends with an error.

Pure: no clock, no process; times come as arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from aioengine.protocol.messages import (
    Abort,
    Control,
    FinishCode,
    Finished,
    Reply,
    Resumed,
    Submit,
    Suspend,
    TextChunks,
)
from aioengine.supervision.trials import Blame, Trials

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioengine.protocol.messages import Begun, ToFrontend, ToScheduler

CRASH_STAGE: Final = "crash"
"""The stage of the error of a request that killed its process, and of a control call that was lost with one."""

_OWN_CALL: Final = -1
"""Id of a control call that nobody waits for."""


class Entry:
    """An open request. ``is_sent``: the scheduler that runs now has it. ``abort``: how it was asked to end, and
    ``has_replayed_abort``: it was so again after a restart. ``is_suspended``: nobody wants more of it for now.
    """

    __slots__ = (
        "abort", "begun", "has_replayed_abort", "is_sent", "is_suspended", "num_preemptions", "submit", "token_ids",
    )  # fmt: skip

    def __init__(self, submit: Submit) -> None:
        resumed = submit.resumed  # it began in another replica
        self.submit = submit
        self.token_ids: list[int] = [] if resumed is None else resumed.token_ids.copy()
        self.begun: Begun | None = None if resumed is None else resumed.begun
        self.num_preemptions = 0 if resumed is None else resumed.num_preemptions
        self.abort: Abort | None = None
        self.has_replayed_abort = False
        self.is_sent = False
        self.is_suspended = False

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that are known to have been computed or drawn."""
        return len(self.submit.prompt_token_ids) + max(len(self.token_ids), self.begun is not None)

    def messages(self, *, is_suspect: bool) -> list[ToScheduler]:
        """The request again, from where it is; and its abort. A suspect tells of each token at once."""
        submit = self.submit
        if self.begun is not None:
            limits = msgspec.structs.replace(submit.limits, refuses_late=False)
            resumed = Resumed(self.begun, self.token_ids.copy(), self.num_preemptions)
            submit = msgspec.structs.replace(submit, limits=limits, resumed=resumed)
        if is_suspect:
            text = msgspec.structs.replace(submit.text, stream=True, stream_interval=1)
            submit = msgspec.structs.replace(submit, text=text)
        return [submit] if self.abort is None else [submit, self.abort]

    def expired(self, now: float) -> str | None:
        """The deadline that has passed for a request that gave nothing yet."""
        return next((which for which, time in self.submit.limits.deadlines().items() if time <= now), None)


class ControlCalls:
    """The open control calls, and whether the scheduler is paused by one."""

    def __init__(self) -> None:
        self._waiting: dict[int, Control] = {}
        self._asked: dict[int, Control] = {}
        self._lost: list[Reply] = []
        self._is_paused = False

    @property
    def has_lost(self) -> bool:
        """Whether nobody was told yet of one that was lost."""
        return bool(self._lost)

    def add(self, control: Control) -> None:
        self._waiting[control.call_id] = control

    def ask(self) -> list[ToScheduler]:
        """Those that wait, which the scheduler is told now."""
        asked, self._waiting = self._waiting, {}
        self._asked |= asked
        return [*asked.values()]

    def own(self) -> list[ToScheduler]:
        """What a new scheduler is told before anything else."""
        return [Control(_OWN_CALL, "pause")] if self._is_paused else []

    def receive(self, reply: Reply) -> None:
        """One has its reply; what it changed outlives the scheduler from now on."""
        asked = self._asked.pop(reply.call_id, None)
        if asked is not None and reply.success and asked.name in ("pause", "continue"):
            self._is_paused = asked.name == "pause"

    def lose(self, how: str) -> None:
        """The scheduler is gone, in this way: what it was told and did not answer is not tried again.

        But "continue" is done: the next one is not paused.
        """
        for control in self._asked.values():
            if control.name == "continue":
                self._is_paused = False
                self._lost.append(Reply(control.call_id, True))
                continue
            message = f"{how} before it had answered {control.name!r}, which was not tried again"
            self._lost.append(Reply(control.call_id, False, message, stage=CRASH_STAGE))
        self._asked.clear()

    def put_back(self) -> None:
        """What the scheduler may have answered was lost: it is asked again."""
        self._waiting = self._asked | self._waiting
        self._asked = {}

    def take_lost(self) -> list[Reply]:
        """The replies that no process will give."""
        lost, self._lost = self._lost, []
        return lost


class Ledger:
    """The open requests and control calls of an engine. Belongs to one loop and never waits.

    Attributes:
        is_connected: there is a scheduler to send to.
        calls: the control calls.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self.calls = ControlCalls()
        self._entries: dict[int, Entry] = {}
        self._given: dict[int, list[int]] = {}  # uid -> the ``token_ids`` of its entry
        self._trials = Trials()
        self._has_progress = True  # some request gave a token since one was found guilty
        self._ended: list[Finished] = []

    @property
    def num_open(self) -> int:
        return len(self._entries)

    @property
    def holds_back(self) -> bool:
        """Whether requests may wait here that the scheduler does not know, or ends that nobody was told."""
        if self._ended or self.calls.has_lost:
            return True
        return bool(self._entries) and (not self.is_connected or self._trials.on_trial is not None)

    # ------------------------------------------------------------ to the scheduler

    def record(self, messages: Iterable[ToScheduler], now: float) -> list[ToScheduler]:
        """Note what the scheduler is told; returns what is to be sent now."""
        due: list[ToScheduler] = []
        for message in messages:
            match message:
                case Submit():
                    entry = self._entries[message.uid] = Entry(message)
                    self._given[message.uid] = entry.token_ids
                    has_begun = entry.begun is not None
                    entry.is_sent = self.is_connected and self._trials.admits(message.uid, has_begun=has_begun)
                    if entry.is_sent:
                        due.append(message)
                case Abort():
                    due += self._abort(message, now)
                case Suspend():
                    due += self._suspend(message)
                case Control():
                    self.calls.add(message)
                    if self.is_connected:
                        due += self.calls.ask()
        return due

    def replay(self) -> list[ToScheduler]:
        """There is a new scheduler: what it has to be told first."""
        self.is_connected = True
        self._trials.settle()
        return [*self.calls.own(), *self._release(), *self.calls.ask()]

    def _abort(self, abort: Abort, now: float) -> list[ToScheduler]:
        """What has not begun and is not sent ends here; of the rest, text may be held back, which a process finds."""
        sent: list[int] = []
        for uid in abort.uids:
            entry = self._entries.get(uid)
            if entry is None:
                continue
            entry.abort = Abort([uid], abort.code, abort.message)
            self._trials.suspects.pop(uid, None)
            if entry.is_sent:
                sent.append(uid)
            elif entry.begun is None:
                self._end(Finished(uid, abort.code, message=abort.message, ended_at=now))
        due: list[ToScheduler] = [Abort(sent, abort.code, abort.message)] if sent else []
        if self.holds_back and self.is_connected:
            self._trials.settle()
            due += self._release()
        return due

    def _suspend(self, suspend: Suspend) -> list[ToScheduler]:
        """A suspect that is suspended shows nothing; others do not wait for it."""
        for uid in suspend.uids:
            if (entry := self._entries.get(uid)) is not None:
                entry.is_suspended = not suspend.is_over
                if entry.is_suspended and uid == self._trials.on_trial:
                    self._trials.suspects.pop(uid, None)
        if not self.is_connected:
            return []
        return [suspend, *self._release()] if self._trials.settle() else [suspend]

    def _release(self) -> list[ToScheduler]:
        """All that may go on now and is not sent. What is aborted ends before it is computed."""
        trials = self._trials
        due: list[ToScheduler] = []
        for uid, entry in self._entries.items():
            if entry.is_sent:
                continue
            if entry.abort is not None or trials.admits(uid, has_begun=entry.begun is not None):
                entry.is_sent = True
                entry.has_replayed_abort = entry.abort is not None
                due += entry.messages(is_suspect=uid == trials.on_trial)
                if entry.is_suspended and uid != trials.on_trial:
                    due.append(Suspend([uid]))
        return due

    # ------------------------------------------------------------ from the processes

    def receive(self, chunks: TextChunks) -> list[ToScheduler]:
        """Note what is given out; returns what is to be sent now."""
        for begun in chunks.begun:
            if (entry := self._entries.get(begun.uid)) is not None:
                entry.begun = begun
        self._note_ids(chunks)
        for uid in chunks.preempted:
            if (preempted := self._entries.get(uid)) is not None:
                preempted.num_preemptions += 1
        for finished in chunks.finished:
            self._forget(finished.uid)
        if chunks.tokens.token_ids:
            self._has_progress = True
        trials = self._trials
        if trials.on_trial is None or not self.is_connected:  # new children give signs of life before all are ready
            return []
        tried = self._entries.get(trials.on_trial)
        due: list[ToScheduler] = []
        if tried is not None and tried.num_known >= trials.suspects.get(trials.on_trial, 0):
            trials.suspects.pop(trials.on_trial, None)
            if tried.is_suspended:  # that had to wait for its trial
                due.append(Suspend([trials.on_trial]))
        return [*due, *self._release()] if trials.settle() else due

    def _note_ids(self, chunks: TextChunks) -> None:
        tokens = chunks.tokens
        for known, token_id in zip(map(self._given.get, tokens.uid_of_each()), tokens.token_ids, strict=True):
            if known is not None:
                known.append(token_id)

    def take_reports(self) -> list[ToFrontend]:
        """What no process will report: the ends of requests, and the replies to controls that were lost."""
        ended, self._ended = self._ended, []
        lost = self.calls.take_lost()
        return [TextChunks(finished=ended), *lost] if ended else [*lost]

    def expire(self, now: float) -> None:
        """End what waits here beyond its deadline, and gave nothing yet."""
        for uid, entry in list(self._entries.items()):
            if not entry.is_sent and entry.begun is None and (which := entry.expired(now)):
                self._end(Finished(uid, FinishCode.DEADLINE, which, ended_at=now))

    # ------------------------------------------------------------ crashes

    def crash(self, rows: Mapping[int, int], how: str, now: float, *, is_scheduler_lost: bool = True) -> Blame:
        """A process is gone; ``rows``: by uid, the end of what the step computed in which it died.

        ``how``: what happened to the process. Nobody is blamed where everything crashes: when no request gave a token
        since the last one was found guilty.
        """
        self.is_connected = False
        if is_scheduler_lost:
            self.calls.lose(how)
        else:
            self.calls.put_back()
        for uid, entry in list(self._entries.items()):
            if entry.is_sent and entry.has_replayed_abort and entry.abort is not None:
                self._end(Finished(uid, entry.abort.code, message=entry.abort.message, ended_at=now))
            entry.is_sent = False
        for uid, end in rows.items():
            suspect = self._entries.get(uid)
            if suspect is not None and suspect.abort is None:
                self._trials.suspects[uid] = max(end, suspect.num_known) + 1
        blame = self._trials.crash(rows)
        is_believed = self._has_progress
        if blame is Blame.GUILTY and self._trials.on_trial is not None:
            message = f"{how} each time it computed this request, at last with no other beside it; all others go on"
            uid = self._trials.on_trial
            self._end(Finished(uid, FinishCode.FAILED, stage=CRASH_STAGE, message=message, ended_at=now))
            self._has_progress = False
        return blame if is_believed else Blame.NOBODY

    def hand_over(self, how: str, now: float) -> list[ToScheduler]:
        """The processes are not replaced: all open requests, from where they are, for another replica.

        Controls without a reply are lost.
        """
        self.calls.ask()
        self.crash({}, how, now)
        self._trials = Trials()
        return self._release()

    def _end(self, finished: Finished) -> None:
        """End a request here."""
        self._forget(finished.uid)
        self._ended.append(finished)

    def _forget(self, uid: int) -> None:
        self._entries.pop(uid, None)
        self._given.pop(uid, None)
        self._trials.suspects.pop(uid, None)
