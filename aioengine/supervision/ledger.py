"""Ledger: records the open requests of a replica, and submits them again when its processes are replaced.

Every message to the scheduler and every delivered chunk passes through the ``Ledger``. It knows the parameters and the
delivered token ids of every open request. These determine the rest of the request.

If a process dies in a step, one of the requests of this step may be the cause. They enter ``Quarantine``:

1. After the restart, one quarantined request at a time is *retried*, together with the requests that had begun and are
   not quarantined. Other quarantined requests, and requests that had not begun, wait.
2. When the retried request has more tokens than at the crash, it leaves the quarantine, and the next one is retried.
3. If a process dies in a step of the retried request, this request is retried *alone*: all other requests wait.
4. If a process dies in such a step again, the request ends with an error.

A control call is sent once. If the scheduler dies before the reply, the call fails.

The ledger has no clock and no I/O. Times are arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from enum import Enum
from typing import Final, cast

from msgspec import Struct
from msgspec.structs import replace

from aioengine.protocol.messages import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    Abort,
    Argument,
    Continuation,
    Control,
    End,
    FinishCode,
    FirstToken,
    Reply,
    Resume,
    Submit,
    Suspend,
    TextChunks,
    ToFrontend,
    ToScheduler,
)
from aioengine.protocol.weight_messages import WeightCall, loaded_by
from aioengine.settings.config import LoadedWeights


class CrashCause(Enum):
    """The cause of a crash, which decides whether the crash counts against ``max_restarts``.

    UNKNOWN: the crash counts.
    RETRY: the retried request, or another one of its step. The crash does not count.
    REQUEST: the request that was retried alone. This crash does not count, and its first crash is subtracted.
    """

    UNKNOWN = 0
    RETRY = 1
    REQUEST = 2


class Quarantine:
    """The requests that may have caused a crash. One of them at a time is retried.

    Attributes:
        requests: uid -> the number of tokens with which the request leaves the quarantine.
        retried: uid of the retried request; None: there is none. is_alone: all other requests wait.
    """

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        self.retried: int | None = None
        self.is_alone = False

    def admits(self, uid: int, *, has_begun: bool) -> bool:
        """Return whether a request may continue now."""
        if self.retried is None or uid == self.retried:
            return True
        return has_begun and uid not in self.requests and not self.is_alone

    def choose_next(self) -> bool:
        """If the retried request has left, retry the next one. Return whether more requests may continue now."""
        if self.retried in self.requests or (self.retried is None and not self.requests):
            return False
        self.is_alone = False
        self.retried = min(self.requests, default=None)
        return True

    def crash(self, rows: Container[int]) -> CrashCause:
        """Record the death of a process. rows: the requests of its step, which the caller has added to ``requests``."""
        if self.retried in self.requests and self.retried in rows:
            cause = CrashCause.REQUEST if self.is_alone else CrashCause.RETRY
            self.is_alone = True
            return cause
        if not self.is_alone:
            self.retried = None
        return CrashCause.UNKNOWN


CRASH_STAGE: Final = "crash"
"""The stage in two errors: of a request that crashes processes, and of a control call lost with the scheduler."""

NUM_FINISHED: Final = 32
"""The number of finished requests whose output is kept."""

MAX_FINISHED_TOKENS: Final = 16_384
"""Longer outputs are not kept."""

LOST_WEIGHTS: Final = (
    "the weights that were given as tensors were lost with their process, so a part of them is not enough: send all "
    "tensors between begin_weight_update and end_weight_update, or load a checkpoint"
)

_OWN_CALL: Final = -1
"""The call id of the ledger's own control calls. Their replies are ignored."""


class OpenRequest(Struct):
    """A request that has not ended.

    Attributes:
        token_ids: the delivered output ids.
        first_token: None until it is delivered.
        abort: the abort of the request; None: it was not aborted.
        has_replayed_abort: the abort was sent again after a restart.
        is_sent: the request was sent to the current scheduler.
        is_suspended: the reader is slow, so the request is suspended.
    """

    submit: Submit
    token_ids: list[int] = []
    first_token: FirstToken | None = None
    num_preemptions: int = 0
    abort: Abort | None = None
    has_replayed_abort: bool = False
    is_sent: bool = False
    is_suspended: bool = False

    @property
    def has_begun(self) -> bool:
        return self.first_token is not None

    @property
    def num_known(self) -> int:
        """A lower bound of the number of prompt and output tokens. A request that has begun has an output token."""
        return len(self.submit.prompt_token_ids) + max(len(self.token_ids), self.has_begun)

    def messages(self, *, is_retried: bool) -> list[ToScheduler]:
        """Return the messages that continue the request after its delivered tokens, with its abort.

        Each token of a retried request is delivered immediately.
        """
        submit = self.submit
        if self.first_token is not None:
            continuation = Continuation(self.first_token, self.token_ids.copy(), self.num_preemptions)
            submit = replace(submit, limits=replace(submit.limits, refuses_late=False), continuation=continuation)
        if is_retried:
            submit = replace(submit, text=replace(submit.text, stream=True, stream_interval=1))
        return [submit] if self.abort is None else [submit, self.abort]


class ControlCalls:
    """The control calls that have no reply yet, and the effects that each new scheduler must have.

    Attributes:
        is_paused: a control call has paused the scheduler.
        lost: the ledger's replies to control calls that were lost with a scheduler.
        pinned: adapter id -> the control call that loaded this pinned adapter. It is sent to each new scheduler.
        weights: the weights of the scheduler. A new one starts with ``weights.after_loss()``.
        released: tags of released memory, which each new scheduler releases, too.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.lost: list[Reply] = []
        self.pinned: dict[Argument, Control] = {}
        self.weights = LoadedWeights()
        self._earlier_weights = LoadedWeights()
        self.released: set[str] = set()
        self._waiting: dict[int, Control] = {}
        self._sent: dict[int, Control] = {}

    def add(self, control: Control) -> None:
        if loaded := loaded_by(control.arguments):
            if self.weights.are_lost and control.arguments.get("is_part"):
                self.lost.append(Reply(control.call_id, False, LOST_WEIGHTS))
                return
            if loaded.are_kept:  # otherwise, a new process cannot start with them
                self._replace_weights(loaded)
        if control.name == UNLOAD_ADAPTER:
            number = control.arguments["id"]
            self.pinned.pop(number, None)
            for calls in (self._waiting, self._sent):  # a load whose caller gave up must not be sent again
                for call_id, call in list(calls.items()):
                    if call.name == LOAD_ADAPTER and call.arguments["id"] == number:
                        del calls[call_id]
        self._waiting[control.call_id] = control

    def take(self) -> list[ToScheduler]:
        """Return the unsent control calls, and record them as sent."""
        waiting, self._waiting = self._waiting, {}
        for control in waiting.values():
            if loaded := loaded_by(control.arguments):
                self._replace_weights(loaded)
        self._sent |= waiting
        return [*waiting.values()]

    def _replace_weights(self, loaded: LoadedWeights) -> None:
        """Set the weights that a control call loads. The call may be sent twice. If it fails, they are taken back."""
        if loaded.number != self.weights.number:
            self._earlier_weights, self.weights = self.weights, loaded

    def receive(self, reply: Reply) -> None:
        """Record a reply, and remember what each new scheduler must repeat: a pause, and loads of pinned adapters."""
        control = self._sent.pop(reply.call_id, None)
        if control is None:
            return
        if not reply.success:
            if loaded_by(control.arguments):
                self.weights = self._earlier_weights
            return
        if control.name in ("pause", "continue"):
            self.is_paused = control.name == "pause"
        elif control.name == WeightCall.RELEASE_MEMORY:
            self.released |= set(cast("list[str]", control.arguments["tags"]))
        elif control.name == WeightCall.RESUME_MEMORY:
            self.released -= set(cast("list[str]", control.arguments["tags"]))
        elif control.name == LOAD_ADAPTER and control.arguments["is_pinned"]:
            self.pinned[control.arguments["id"]] = replace(control, call_id=_OWN_CALL)

    def lose(self, reason: str) -> None:
        """Fail all sent control calls, because the scheduler was lost. ``reason``: beginning of the error texts.

        "continue" succeeds, because the next scheduler is not paused, and so do new weights with which it starts.
        """
        for control in self._sent.values():
            loaded = loaded_by(control.arguments)
            if control.name == "continue" or (loaded is not None and loaded.are_kept):
                self.is_paused &= control.name != "continue"
                self.lost.append(Reply(control.call_id, True))
                continue
            text = f"{reason} before it answered {control.name!r}; this call was not repeated"
            self.lost.append(Reply(control.call_id, False, text, stage=CRASH_STAGE))
        self._sent.clear()

    def put_back(self) -> None:
        """Mark all control calls as unsent. They are sent again, because replies of the scheduler may be lost."""
        self._waiting = self._sent | self._waiting
        self._sent = {}


class Ledger:
    """The open requests and control calls of a replica. Belongs to one event loop and never waits.

    Attributes:
        is_connected: whether a scheduler accepts messages.
        controls: the control calls.
        finished: uid -> the output ids of the last requests that stopped or reached their length.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self.finished: dict[int, list[int]] = {}
        self.controls = ControlCalls()
        self._requests: dict[int, OpenRequest] = {}
        self._quarantine = Quarantine()
        self._has_progress = True  # a token was delivered since a request ended because of its crashes
        self._ended: list[End] = []

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def has_unsent(self) -> bool:
        """Whether there are unsent reports, or may be unsent requests."""
        if self._ended or self.controls.lost:
            return True
        return bool(self._requests) and (not self.is_connected or self._quarantine.retried is not None)

    # ------------------------------------------------------------ to the scheduler

    def record(self, messages: Iterable[ToScheduler], now: float) -> list[ToScheduler]:
        """Record messages to the scheduler. Return the messages to send now."""
        due: list[ToScheduler] = []
        for message in messages:
            match message:
                case Submit(uid=uid):
                    request = self._requests[uid] = OpenRequest(message)
                    if (earlier := message.continuation) is not None:  # the request began in another replica
                        request.token_ids = earlier.token_ids.copy()
                        request.first_token, request.num_preemptions = earlier.first_token, earlier.num_preemptions
                    if self.is_connected and self._quarantine.retried is None:
                        request.is_sent = True
                        due.append(message)
                    elif self.is_connected:
                        due += self._release()
                case Abort():
                    due += self._abort(message, now)
                case Suspend() | Resume():
                    due += self._suspend(message)
                case Control():
                    self.controls.add(message)
                    if self.is_connected:
                        due += self.controls.take()
        return due

    def replay(self) -> list[ToScheduler]:
        """Record that a new scheduler is ready. Return the first messages to send to it."""
        self.is_connected = True
        self._quarantine.choose_next()
        pause = [Control(_OWN_CALL, "pause")] if self.controls.is_paused else []
        if released := sorted(self.controls.released):
            pause.append(Control(_OWN_CALL, WeightCall.RELEASE_MEMORY, {"tags": released}))
        return [*pause, *self.controls.pinned.values(), *self._release(), *self.controls.take()]

    def _abort(self, abort: Abort, now: float) -> list[ToScheduler]:
        """Record an abort. Return the messages to send now.

        An unsent request without output ends here. Any other request ends in the scheduler, because the detokenizer
        may still hold back some of its text.
        """
        sent: list[int] = []
        for uid in abort.uids:
            request = self._requests.get(uid)
            if request is None:
                continue
            request.abort = Abort([uid], abort.code, abort.message)
            self._quarantine.requests.pop(uid, None)
            if request.is_sent:
                sent.append(uid)
            elif not request.has_begun:
                self._end(End(uid, abort.code, message=abort.message, ended_at=now))
        due: list[ToScheduler] = [Abort(sent, abort.code, abort.message)] if sent else []
        if self.has_unsent and self.is_connected:
            self._quarantine.choose_next()
            due += self._release()
        return due

    def _suspend(self, message: Suspend | Resume) -> list[ToScheduler]:
        """Record a suspend or resume. Return the messages to send now.

        If the retried request is suspended, it leaves the quarantine, so that other requests do not wait for it.
        """
        for uid in message.uids:
            if (request := self._requests.get(uid)) is not None:
                request.is_suspended = isinstance(message, Suspend)
                if request.is_suspended and uid == self._quarantine.retried:
                    self._quarantine.requests.pop(uid, None)
        if not self.is_connected:
            return []
        return [message, *self._release()] if self._quarantine.choose_next() else [message]

    def _release(self) -> list[ToScheduler]:
        """Return the messages of unsent requests that may continue now.

        Aborted requests are included: the scheduler ends them without a step.
        """
        quarantine = self._quarantine
        due: list[ToScheduler] = []
        for uid, request in self._requests.items():
            if request.is_sent:
                continue
            if request.abort is not None or quarantine.admits(uid, has_begun=request.has_begun):
                request.is_sent = True
                request.has_replayed_abort = request.abort is not None
                due += request.messages(is_retried=uid == quarantine.retried)
                if request.is_suspended and uid != quarantine.retried:
                    due.append(Suspend([uid]))
        return due

    # ------------------------------------------------------------ from the processes

    def receive(self, chunks: TextChunks) -> list[ToScheduler]:
        """Record delivered chunks. Return the messages to send now."""
        for first_token in chunks.first_tokens:
            if (request := self._requests.get(first_token.uid)) is not None:
                request.first_token = first_token
        tokens = chunks.tokens
        for request, token_id in zip(map(self._requests.get, tokens.uid_of_each()), tokens.token_ids, strict=True):
            if request is not None:
                request.token_ids.append(token_id)
        for uid in chunks.preempted:
            if (request := self._requests.get(uid)) is not None:
                request.num_preemptions += 1
        for end in chunks.ended[-NUM_FINISHED:]:
            request = self._requests.get(end.uid)
            if request is None or end.code not in (FinishCode.STOP, FinishCode.LENGTH):
                continue
            if 0 < len(request.token_ids) <= MAX_FINISHED_TOKENS:
                self.finished[end.uid] = request.token_ids
                if len(self.finished) > NUM_FINISHED:
                    del self.finished[next(iter(self.finished))]
        for end in chunks.ended:
            self._forget(end.uid)
        if tokens.token_ids:
            self._has_progress = True
        retried = self._quarantine.retried
        if retried is None or not self.is_connected:  # a new child may send messages before the others are ready
            return []
        request = self._requests.get(retried)
        due: list[ToScheduler] = []
        if request is not None and request.num_known >= self._quarantine.requests.get(retried, 0):
            self._quarantine.requests.pop(retried, None)
            if request.is_suspended:  # the suspension was delayed by the retry
                due.append(Suspend([retried]))
        return [*due, *self._release()] if self._quarantine.choose_next() else due

    def take_reports(self) -> list[ToFrontend]:
        """Return reports that no process will send: ends of requests, and replies to lost control calls."""
        ended, self._ended = self._ended, []
        lost, self.controls.lost = self.controls.lost, []
        return [TextChunks(ended=ended), *lost] if ended else [*lost]

    def expire(self, now: float) -> None:
        """End unsent requests without output that have passed a deadline."""
        for uid, request in list(self._requests.items()):
            if not request.is_sent and not request.has_begun:
                passed = [which for which, time in request.submit.limits.deadlines.items() if time <= now]
                if passed:
                    self._end(End(uid, FinishCode.DEADLINE, passed[0], ended_at=now))

    # ------------------------------------------------------------ crashes

    def crash(self, rows: Mapping[int, int], reason: str, now: float, *, is_scheduler_lost: bool = True) -> CrashCause:
        """Record the loss of a process. Return the cause.

        If requests crash without any token in between, probably every step crashes. The cause is then UNKNOWN.

        Args:
            rows: uid -> end position of the row, for the requests in the last step of the process.
            reason: beginning of the error texts.
        """
        self.is_connected = False
        if is_scheduler_lost:
            self.controls.lose(reason)
            if not self.controls.weights.are_kept:
                self._end_all(reason, now)
            self.controls.weights = self.controls.weights.after_loss()
        else:
            self.controls.put_back()
        for uid, request in list(self._requests.items()):
            if request.is_sent and request.has_replayed_abort and request.abort is not None:
                self._end(End(uid, request.abort.code, message=request.abort.message, ended_at=now))
            request.is_sent = False
        for uid, end in rows.items():
            crashed = self._requests.get(uid)
            if crashed is not None and crashed.abort is None:
                self._quarantine.requests[uid] = max(end, crashed.num_known) + 1
        cause = self._quarantine.crash(rows)
        had_progress = self._has_progress
        if cause is CrashCause.REQUEST:
            self._end_retried(reason, now, ", even alone")
            self._has_progress = False
        return cause if had_progress else CrashCause.UNKNOWN

    def hand_over(self, reason: str, now: float) -> tuple[list[ToScheduler], dict[int, int]]:
        """Hand all open requests over to another replica, because the processes are lost and not replaced.

        Return the messages that continue the requests, and the quarantined requests for ``adopt`` of the other replica.
        If a process died in a step of the retried request, this request ends with an error, because it would kill
        processes of other replicas too. Control calls without a reply fail.
        """
        self.controls.take()
        self.crash({}, reason, now)
        if self._quarantine.is_alone and self._quarantine.retried in self._quarantine.requests:
            self._end_retried(reason, now)
        quarantined, self._quarantine = self._quarantine.requests, Quarantine()
        messages = self._release()
        self._requests.clear()
        return messages, quarantined

    def adopt(self, quarantined: Mapping[int, int]) -> None:
        """Quarantine requests of another replica, which are submitted next."""
        self._quarantine.requests |= quarantined
        if self.is_connected:
            self._quarantine.choose_next()

    def _end_retried(self, reason: str, now: float, circumstance: str = "") -> None:
        uid = self._quarantine.retried
        assert uid is not None
        text = f"{reason} each time it computed this request{circumstance}; the other requests continue"
        self._end(End(uid, FinishCode.FAILED, stage=CRASH_STAGE, message=text, ended_at=now))

    def _end_all(self, reason: str, now: float) -> None:
        """End all requests, because the weights that computed them are lost."""
        weights = self.controls.weights
        text = (
            f"{reason}, and the weights of version {weights.version!r}, which were given as tensors, are lost with "
            f"it; new requests get version {weights.disk_version!r}; enable_weights_cpu_backup=True keeps a copy"
        )
        for uid in list(self._requests):
            self._end(End(uid, FinishCode.FAILED, stage=CRASH_STAGE, message=text, ended_at=now))

    def _end(self, end: End) -> None:
        """End a request here. ``take_reports`` returns the end."""
        self._forget(end.uid)
        self._ended.append(end)

    def _forget(self, uid: int) -> None:
        self._requests.pop(uid, None)
        self._quarantine.requests.pop(uid, None)
