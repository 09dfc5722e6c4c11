"""Ledger: the open requests of a replica, and what is submitted again when its processes are replaced.

Every message to the scheduler and every delivered chunk passes the ``Ledger``. So it has, for every open request, its
parameters and every token id that was delivered; everything else is a function of these.

The requests in the step in which a process died are *suspects* (see ``Trials``): after the restart they go on one at a
time, beside the requests that had begun; requests that had not begun wait until all suspects are cleared. A suspect is
cleared once it has more tokens than at the crash. If a process dies again in a step of the suspect on trial, that
suspect is tried alone; if it dies once more, the request ends with an error. All others go on.

A control is sent once: one without a reply when the scheduler died ends with an error.

Pure: no clock, no process; times come as arguments.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from aioengine.protocol.messages import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    Abort,
    Continuation,
    Control,
    End,
    FinishCode,
    Reply,
    Resume,
    Submit,
    Suspend,
    TextChunks,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from aioengine.protocol.messages import Argument, FirstToken, ToFrontend, ToScheduler


class Blame(Enum):
    """Who caused a crash.

    NOBODY: it counts as a restart. SUSPECT: the suspect on trial, so it does not count. GUILTY: the same suspect again,
    tried alone; then the crash that made it a suspect does not count any more, either.
    """

    NOBODY = 0
    SUSPECT = 1
    GUILTY = 2


class Trials:
    """The suspects, of which one at a time is on trial.

    Attributes:
        suspects: uid -> the number of tokens with which it has got past its crash.
        on_trial: the suspect that goes on. is_alone: nothing else does.
    """

    def __init__(self) -> None:
        self.suspects: dict[int, int] = {}
        self.on_trial: int | None = None
        self.is_alone = False

    def admits(self, uid: int, *, has_begun: bool) -> bool:
        """Whether a request may go on now."""
        if self.on_trial is None or uid == self.on_trial:
            return True
        return has_begun and uid not in self.suspects and not self.is_alone

    def clear(self, uid: int) -> None:
        """The request is no suspect, or has ended. ``settle`` then chooses another one."""
        self.suspects.pop(uid, None)

    def settle(self) -> bool:
        """Choose the next suspect on trial, unless there is one; returns whether other requests may go on now."""
        if self.on_trial in self.suspects or (self.on_trial is None and not self.suspects):
            return False
        self.is_alone = False
        self.on_trial = min(self.suspects, default=None)
        return True

    def crash(self, rows: Container[int]) -> Blame:
        """A process died in a step of these requests, which are all suspects now."""
        if self.on_trial in self.suspects and self.on_trial in rows:
            blame = Blame.GUILTY if self.is_alone else Blame.SUSPECT
            self.is_alone = True
            return blame
        if not self.is_alone:
            self.on_trial = None
        return Blame.NOBODY


CRASH_STAGE: Final = "crash"
"""The stage in the error of a request that killed its process, and of a control that was lost with one."""

_OWN_CALL: Final = -1
"""The id of the ledger's own controls; their replies are ignored."""


class OpenRequest:
    """A request without an end.

    Attributes:
        token_ids: the output ids that were delivered. first_token: None until it came. num_preemptions: how often it
            was preempted.
        abort: how it shall end. has_replayed_abort: the abort was sent again, after a restart.
        is_sent: the present scheduler has the request. is_suspended: no more of it is computed for now.
    """

    __slots__ = (
        "abort", "first_token", "has_replayed_abort", "is_sent", "is_suspended", "num_preemptions", "submit",
        "token_ids",
    )  # fmt: skip

    def __init__(self, submit: Submit) -> None:
        continuation = submit.continuation  # it began in another replica
        self.submit = submit
        self.token_ids: list[int] = [] if continuation is None else continuation.token_ids.copy()
        self.first_token: FirstToken | None = None if continuation is None else continuation.first_token
        self.num_preemptions = 0 if continuation is None else continuation.num_preemptions
        self.abort: Abort | None = None
        self.has_replayed_abort = False
        self.is_sent = False
        self.is_suspended = False

    @property
    def has_begun(self) -> bool:
        return self.first_token is not None

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that were certainly computed or sampled."""
        return len(self.submit.prompt_token_ids) + max(len(self.token_ids), self.has_begun)

    def messages(self, *, is_suspect: bool) -> list[ToScheduler]:
        """The request again, from where it is, with its abort. Each token of a suspect is delivered at once."""
        submit = self.submit
        if self.first_token is not None:
            continuation = Continuation(self.first_token, self.token_ids.copy(), self.num_preemptions)
            submit = replace(submit, limits=replace(submit.limits, refuses_late=False), continuation=continuation)
        if is_suspect:
            submit = replace(submit, text=replace(submit.text, stream=True, stream_interval=1))
        return [submit] if self.abort is None else [submit, self.abort]


class ControlCalls:
    """The controls without a reply.

    Attributes:
        is_paused: the scheduler was paused by a control.
        lost: the replies to controls that were lost, which no process will send.
        pinned: by id, the controls that loaded the pinned adapters, which each new scheduler gets.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.lost: list[Reply] = []
        self.pinned: dict[Argument, Control] = {}
        self._waiting: dict[int, Control] = {}
        self._sent: dict[int, Control] = {}

    def add(self, control: Control) -> None:
        if control.name == UNLOAD_ADAPTER:
            number = control.arguments["id"]
            self.pinned.pop(number, None)
            for calls in (self._waiting, self._sent):  # a load that its caller gave up must not be sent again
                for call_id, call in [*calls.items()]:
                    if call.name == LOAD_ADAPTER and call.arguments["id"] == number:
                        del calls[call_id]
        self._waiting[control.call_id] = control

    def take(self) -> list[ToScheduler]:
        """The controls that wait, which are sent now."""
        waiting, self._waiting = self._waiting, {}
        self._sent |= waiting
        return [*waiting.values()]

    def receive(self, reply: Reply) -> None:
        """Note a reply. A pause, and a pinned adapter, outlive the scheduler from now on."""
        control = self._sent.pop(reply.call_id, None)
        if control is not None and reply.success and control.name in ("pause", "continue"):
            self.is_paused = control.name == "pause"
        if control is not None and reply.success and control.name == LOAD_ADAPTER and control.arguments["is_pinned"]:
            self.pinned[control.arguments["id"]] = replace(control, call_id=_OWN_CALL)

    def lose(self, how: str) -> None:
        """The scheduler is lost, as ``how`` says: controls that it has are not sent again.

        But "continue" succeeds: the next scheduler is not paused.
        """
        for control in self._sent.values():
            if control.name == "continue":
                self.is_paused = False
                self.lost.append(Reply(control.call_id, True))
                continue
            text = f"{how} before it had answered {control.name!r}, which was not tried again"
            self.lost.append(Reply(control.call_id, False, text, stage=CRASH_STAGE))
        self._sent.clear()

    def put_back(self) -> None:
        """Replies of the scheduler may be lost: all controls are sent again."""
        self._waiting = self._sent | self._waiting
        self._sent = {}


class Ledger:
    """The open requests and controls of a replica. Belongs to one loop and never waits.

    Attributes:
        is_connected: there is a scheduler to send to.
        calls: the controls.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self.calls = ControlCalls()
        self._requests: dict[int, OpenRequest] = {}
        self._token_ids: dict[int, list[int]] = {}  # uid -> the ``token_ids`` of its request
        self._trials = Trials()
        self._has_progress = True  # some request gave a token since one was found guilty
        self._ended: list[End] = []

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def holds_back(self) -> bool:
        """Whether there may be requests that were not sent, or reports to take."""
        if self._ended or self.calls.lost:
            return True
        return bool(self._requests) and (not self.is_connected or self._trials.on_trial is not None)

    # ------------------------------------------------------------ to the scheduler

    def record(self, messages: Iterable[ToScheduler], now: float) -> list[ToScheduler]:
        """Record messages to the scheduler; returns what is sent now."""
        due: list[ToScheduler] = []
        for message in messages:
            match message:
                case Submit(uid=uid):
                    request = self._requests[uid] = OpenRequest(message)
                    self._token_ids[uid] = request.token_ids
                    request.is_sent = self.is_connected and self._trials.admits(uid, has_begun=request.has_begun)
                    if request.is_sent:
                        on_trial = self._trials.on_trial
                        due += [message] if on_trial is None else request.messages(is_suspect=uid == on_trial)
                case Abort():
                    due += self._abort(message, now)
                case Suspend() | Resume():
                    due += self._suspend(message)
                case Control():
                    self.calls.add(message)
                    if self.is_connected:
                        due += self.calls.take()
        return due

    def replay(self) -> list[ToScheduler]:
        """There is a new scheduler; returns what is sent to it first."""
        self.is_connected = True
        self._trials.settle()
        pause = [Control(_OWN_CALL, "pause")] if self.calls.is_paused else []
        return [*pause, *self.calls.pinned.values(), *self._release(), *self.calls.take()]

    def _abort(self, abort: Abort, now: float) -> list[ToScheduler]:
        """A request that was not sent and gave nothing ends here. Of others a process may hold back text."""
        sent: list[int] = []
        for uid in abort.uids:
            request = self._requests.get(uid)
            if request is None:
                continue
            request.abort = Abort([uid], abort.code, abort.message)
            self._trials.clear(uid)
            if request.is_sent:
                sent.append(uid)
            elif not request.has_begun:
                self._end(End(uid, abort.code, message=abort.message, ended_at=now))
        due: list[ToScheduler] = [Abort(sent, abort.code, abort.message)] if sent else []
        if self.holds_back and self.is_connected:
            self._trials.settle()
            due += self._release()
        return due

    def _suspend(self, message: Suspend | Resume) -> list[ToScheduler]:
        """A suspect that is suspended proves nothing; others do not wait for it."""
        for uid in message.uids:
            if (request := self._requests.get(uid)) is not None:
                request.is_suspended = isinstance(message, Suspend)
                if request.is_suspended and uid == self._trials.on_trial:
                    self._trials.clear(uid)
        if not self.is_connected:
            return []
        return [message, *self._release()] if self._trials.settle() else [message]

    def _release(self) -> list[ToScheduler]:
        """The requests that may go on now and were not sent. One that was aborted ends before it is computed."""
        trials = self._trials
        due: list[ToScheduler] = []
        for uid, request in self._requests.items():
            if request.is_sent:
                continue
            if request.abort is not None or trials.admits(uid, has_begun=request.has_begun):
                request.is_sent = True
                request.has_replayed_abort = request.abort is not None
                due += request.messages(is_suspect=uid == trials.on_trial)
                if request.is_suspended and uid != trials.on_trial:
                    due.append(Suspend([uid]))
        return due

    # ------------------------------------------------------------ from the processes

    def receive(self, chunks: TextChunks) -> list[ToScheduler]:
        """Record what is delivered; returns what is sent now."""
        for first_token in chunks.first_tokens:
            if (request := self._requests.get(first_token.uid)) is not None:
                request.first_token = first_token
        tokens = chunks.tokens
        for known, token_id in zip(map(self._token_ids.get, tokens.uid_of_each()), tokens.token_ids, strict=True):
            if known is not None:
                known.append(token_id)
        for uid in chunks.preempted:
            if (request := self._requests.get(uid)) is not None:
                request.num_preemptions += 1
        for end in chunks.ended:
            self._forget(end.uid)
        if tokens.token_ids:
            self._has_progress = True
        if self._trials.on_trial is None or not self.is_connected:  # new children send messages before all are ready
            return []
        return self._go_on_with_trials(self._trials.on_trial)

    def _go_on_with_trials(self, uid: int) -> list[ToScheduler]:
        """Clear the suspect on trial once it has got past its crash, and try the next one."""
        request = self._requests.get(uid)
        due: list[ToScheduler] = []
        if request is not None and request.num_known >= self._trials.suspects.get(uid, 0):
            self._trials.clear(uid)
            if request.is_suspended:  # the suspension had to wait for the trial
                due.append(Suspend([uid]))
        return [*due, *self._release()] if self._trials.settle() else due

    def take_reports(self) -> list[ToFrontend]:
        """What no process will report: ends of requests, and replies to controls that were lost."""
        ended, self._ended = self._ended, []
        lost, self.calls.lost = self.calls.lost, []
        return [TextChunks(ended=ended), *lost] if ended else [*lost]

    def expire(self, now: float) -> None:
        """End requests that wait here beyond a deadline and gave nothing yet."""
        for uid, request in list(self._requests.items()):
            if not request.is_sent and not request.has_begun:
                passed = [which for which, time in request.submit.limits.deadlines().items() if time <= now]
                if passed:
                    self._end(End(uid, FinishCode.DEADLINE, passed[0], ended_at=now))

    # ------------------------------------------------------------ crashes

    def crash(self, rows: Mapping[int, int], how: str, now: float, *, is_scheduler_lost: bool = True) -> Blame:
        """A process is lost, as ``how`` says. ``rows``: by uid, the end of what its last step computed.

        Nobody is blamed where everything crashes: when no request gave a token since the last one was found guilty.
        """
        self.is_connected = False
        if is_scheduler_lost:
            self.calls.lose(how)
        else:
            self.calls.put_back()
        for uid, request in list(self._requests.items()):
            if request.is_sent and request.has_replayed_abort and request.abort is not None:
                self._end(End(uid, request.abort.code, message=request.abort.message, ended_at=now))
            request.is_sent = False
        for uid, end in rows.items():
            suspect = self._requests.get(uid)
            if suspect is not None and suspect.abort is None:
                self._trials.suspects[uid] = max(end, suspect.num_known) + 1
        blame = self._trials.crash(rows)
        is_believed = self._has_progress
        if blame is Blame.GUILTY and self._trials.on_trial is not None:
            self._end_guilty(self._trials.on_trial, how, now, ", at last with no other beside it")
            self._has_progress = False
        return blame if is_believed else Blame.NOBODY

    def hand_over(self, how: str, now: float) -> tuple[list[ToScheduler], dict[int, int]]:
        """The processes are lost and not replaced: all open requests, from where they are, for another replica.

        Returns the messages, and the suspects among them for its ``adopt``. A suspect that killed this replica in its
        trial would kill the other ones, too: it ends with an error. Controls without a reply are lost.
        """
        self.calls.take()
        self.crash({}, how, now)
        if self._trials.is_alone and self._trials.on_trial in self._trials.suspects:
            self._end_guilty(self._trials.on_trial, how, now)
        suspects, self._trials = self._trials.suspects, Trials()
        messages = self._release()
        self._requests.clear()
        self._token_ids.clear()
        return messages, suspects

    def adopt(self, suspects: Mapping[int, int]) -> None:
        """Requests that come next are suspects of another replica: they go on one at a time."""
        self._trials.suspects |= suspects
        if self.is_connected:
            self._trials.settle()

    def _end_guilty(self, uid: int, how: str, now: float, circumstance: str = "") -> None:
        text = f"{how} each time it computed this request{circumstance}; all others go on"
        self._end(End(uid, FinishCode.FAILED, stage=CRASH_STAGE, message=text, ended_at=now))

    def _end(self, end: End) -> None:
        """End a request here; the end is reported later."""
        self._forget(end.uid)
        self._ended.append(end)

    def _forget(self, uid: int) -> None:
        self._requests.pop(uid, None)
        self._token_ids.pop(uid, None)
        self._trials.clear(uid)
