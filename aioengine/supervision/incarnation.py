"""Incarnation: one start of the scheduler, from its launch until it is lost or all children are ended.

What comes after a loss, another incarnation or the end of the engine, is the supervisor's business. Every incarnation
has sockets and an epoch of its own, so nothing of an earlier one can come. An incarnation that lost its detokenizer
alone can be mended: another one is started, and the scheduler goes on with it in a new epoch, without its requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from msgspec import Struct

from aioengine.errors import EngineDeadError, EngineError, EngineStalledError
from aioengine.logs import log
from aioengine.protocol.codec import LostFrameError, UnencodableError
from aioengine.protocol.messages import (
    DETOKENIZER,
    SCHEDULER,
    Control,
    Failed,
    FinishCode,
    Finished,
    LogRecord,
    Message,
    Progress,
    Ready,
    Reply,
    Stats,
    Submit,
    TextChunks,
    ToFrontend,
)
from aioengine.supervision.family import Family
from aioengine.supervision.handshake import Handshake
from aioengine.supervision.heartbeats import Heartbeats
from aioengine.supervision.processes import ProcessState
from aioengine.supervision.tasks import EngineTask, post, runs_here
from aioengine.transport.base import BacklogFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from aioengine.config import Settings
    from aioengine.protocol.messages import Role, ToScheduler
    from aioengine.supervision.launchers._base import Launcher, RunningChild


MEND_TIMEOUT_S: Final = 20.0
"""So long the scheduler may take to end its step, and then another detokenizer to start; else both are replaced."""


_STAGE: Final = "submit"


class Loss(Struct, frozen=True):
    """Why an incarnation is over. ``rows``: what the lost child was computing, uid -> end of its row.

    ``is_final``: nothing that another incarnation would mend. ``is_mendable``: all but the detokenizer live and can go
    on.
    """

    error: EngineError
    rows: dict[int, int] = {}
    is_final: bool = False
    is_mendable: bool = False


class Timeouts(Struct, frozen=True):
    """How long a start may take, and a child may be silent."""

    startup_s: float
    stall_s: float


class Outgoing:
    """Gathers messages for the rest of a round of the loop, or until their prompts fill a step.

    A program that starts a thousand requests at once takes long to start them all. The first of them are computed
    meanwhile, in as large steps as if all had come together.
    """

    def __init__(self, send: Callable[[list[Message]], None], step_tokens: int) -> None:
        """``send`` gets what makes one frame. ``step_tokens``: prompt tokens of the largest step."""
        self._send = send
        self._step_tokens = step_tokens
        self._messages: list[Message] = []
        self._num_tokens = 0
        self._is_due = False

    def add(self, messages: Iterable[Message]) -> None:
        """Send these soon, behind those before them. Without messages: an empty frame, if there is nothing else."""
        for message in messages:
            self._messages.append(message)
            if isinstance(message, Submit):
                self._num_tokens += len(message.prompt_token_ids)
        if self._num_tokens >= self._step_tokens:
            self._flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_due = False
        self._flush()

    def _flush(self) -> None:
        messages, self._messages, self._num_tokens = self._messages, [], 0
        self._send(messages)


class Incarnation:
    """Owns the children of one start, on one loop.

    ``on_messages`` gets what the children say (``TextChunks``, ``Stats``, ``Reply``), ``on_progress`` how far long
    work has come. ``on_loss`` is called when, after the start, a child died, gave no sign of life for too long, or
    messages could not be handled. The children are killed then, and ``end`` is still to be called; only where the loss
    is mendable, ``mend`` may be called instead. Until then nothing is heard of them.
    """

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[Role],
        launcher_class: type[Launcher],
        *,
        timeouts: Timeouts,
        on_messages: Callable[[list[ToFrontend]], None],
        on_loss: Callable[[Loss], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._roles = roles
        self._launcher = launcher_class(settings, roles)
        self._family = Family(self._launcher.children, self._child_ended)
        self._startup_timeout_s = timeouts.startup_s
        self._on_messages = on_messages
        self._on_loss = on_loss
        self._on_progress = on_progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handshake: Handshake | None = None
        self._pump: EngineTask | None = None
        self._outgoing = Outgoing(self._transmit, settings.scheduler.chunk_tokens)
        self._is_started = False
        self._is_broken = False  # from the loss of the detokenizer until it is mended
        self._is_ended = False  # from any other loss, end or kill on
        self._heartbeats = Heartbeats(timeouts.stall_s)
        self._step_ended_at = 0.0

    async def start(self) -> dict[str, object]:
        """Start the children, wait until all are ready, and return what they run on. Once only.

        Raises:
            EngineStartupError: with a child's own error, message and traceback; none is left running then.
        """
        return await self._begin([(self._roles, self._launcher.launch)])

    async def mend(self) -> dict[str, object]:
        """Replace the detokenizer, after a loss that is mendable.

        Raises:
            EngineStartupError, BacklogFullError: that could not be done; none of the children is left running then.
        """
        self._startup_timeout_s = min(self._startup_timeout_s, MEND_TIMEOUT_S)
        await self._family.end_one(DETOKENIZER)
        return await self._begin(
            [((SCHEDULER,), self._launcher.begin_epoch), ((DETOKENIZER,), self._launcher.launch_detokenizer)]
        )

    async def _begin(self, stages: list[tuple[Collection[Role], Callable[[], Awaitable[None]]]]) -> dict[str, object]:
        """Do each of these, and wait until the children of these roles are ready."""
        self._loop = asyncio.get_running_loop()
        facts: dict[str, object] = {}
        try:
            for roles, launch in stages:
                self._handshake = Handshake(roles)
                await launch()
                if self._pump is None or self._pump.is_done:
                    self._pump = EngineTask(self._run_pump(), name="aioengine-pump", on_failure=self._pump_failed)
                self._family.watch()
                for child in self._family.ended(roles):
                    self._handshake.child_ended(child)
                facts |= await self._handshake.wait(self._startup_timeout_s)
            self._is_started, self._is_broken = True, False
            # (Further ranks step together with the first, whose silence is theirs.)
            self._heartbeats.watch([role for role in self._roles if role.rank == 0], self._lose)
            for child in self._family.ended(self._roles):  # just now, which the handshake did not care about any more
                asyncio.get_running_loop().call_soon(self._child_ended, child)
            return facts
        except GeneratorExit:  # the loop was closed, and nothing can be awaited
            self.kill_now()
            raise
        except BaseException:
            await self.end(polite_s=0.0)
            raise

    def send(self, messages: list[ToScheduler]) -> None:
        """Send to the scheduler soon; what is sent in one round of the loop makes few frames. Nothing after an end."""
        self._outgoing.add(messages)

    def processes(self) -> list[ProcessState]:
        """Every child as it is now."""
        now = time.monotonic()
        step_s = now - self._step_ended_at if self._step_ended_at > 0 else None
        return [
            ProcessState(
                role=str(child.role),
                pid=child.pid,
                alive=child.is_alive,
                last_heartbeat_s=self._heartbeats.age_s(child.role, now),
                last_step_s=step_s if child.role == SCHEDULER else None,
            )
            for child in self._launcher.children
        ]

    def rows_in_flight(self, role: Role) -> dict[int, int]:
        """What the child of this role computes, or was computing at its end: uid -> the end of its row."""
        found = [child.rows_in_flight() for child in self._launcher.children if child.role == role]
        return found[0] if found else {}

    # ------------------------------------------------------------ messages

    def _transmit(self, messages: list[Message]) -> None:
        """Send one frame. Who sends is in the midst of something else: a loss is told later."""
        if self._is_ended or self._is_broken:
            return
        loop = asyncio.get_running_loop()
        try:
            self._send(messages)
        except BacklogFullError as error:
            stalled = EngineStalledError(f"the scheduler process does not take its messages: {error}")
            loop.call_soon(self._lose, SCHEDULER, stalled)
        except Exception as error:  # messages that are lost would be waited for without an end
            failure = EngineError(f"messages for the scheduler could not be sent: {error!r}")
            failure.__cause__ = error
            loop.call_soon(partial(self._lose, None, failure, is_final=True))

    def _send(self, messages: list[Message]) -> None:
        """Send them as one frame, or one by one without those that cannot be encoded, which fail alone."""
        try:
            self._launcher.sender.send(messages)
        except UnencodableError as error:
            if len(messages) == 1:
                asyncio.get_running_loop().call_soon(self._tell, _failure(messages[0], error))
                return
            for message in messages:
                self._send([message])

    def _tell(self, message: ToFrontend) -> None:
        """Hand on what this process itself has found; what is lost until then comes again."""
        if not self._is_ended and not self._is_broken:
            self._on_messages([message])

    async def _run_pump(self) -> None:
        """The only reader of what the children say. It ends with the engine, or the engine ends with it."""
        receiver = self._launcher.receiver
        try:
            while True:
                self._dispatch(await receiver.receive())
        except Exception as error:
            if self._handshake is not None:
                self._handshake.broke(error)
            is_lost = isinstance(error, LostFrameError)
            what = "came damaged" if is_lost else "could not be handled"
            failure = EngineError(f"messages of the engine's processes {what}: {error!r}")
            failure.__cause__ = error
            self._lose(None, failure, is_final=not is_lost)

    def _pump_failed(self, error: EngineDeadError) -> None:
        """Nothing is received any more, so nothing that waits can end, also while a detokenizer is replaced."""
        if self._handshake is not None:
            self._handshake.broke(error)
        self._is_broken = False
        self._lose(None, error, is_final=True)

    def _dispatch(self, messages: list[Message]) -> None:
        now = time.monotonic()
        for_frontend: list[ToFrontend] = []
        for message in messages:
            match message:
                case TextChunks():
                    self._heartbeats.hear(DETOKENIZER, now)
                    for_frontend.append(message)
                case Stats():
                    self._heartbeats.hear(SCHEDULER, now)
                    self._step_ended_at = message.step_ended_at
                    for_frontend.append(message)
                    self.send([])  # an empty frame, by which it finds that one before was lost
                case Progress() | Ready() | Failed():
                    if self._handshake is not None and not self._handshake.is_over:
                        self._handshake.take(message)
                    if isinstance(message, Progress):
                        self._on_progress(message)
                    else:
                        self._heartbeats.hear(message.role, now)
                case LogRecord():
                    log(logging.getLogger(message.logger), message.level, "%s", message.message)
                case _:
                    for_frontend.append(cast("ToFrontend", message))
        if for_frontend and not self._is_ended and not self._is_broken:
            self._on_messages(for_frontend)

    # ------------------------------------------------------------ losses

    def _child_ended(self, child: RunningChild) -> None:
        if self._is_ended or self._handshake is None or child not in self._launcher.children:
            return
        if not self._is_started or self._is_broken:
            self._handshake.child_ended(child)
            return
        error = EngineDeadError(str(child.role), pid=child.pid, exit_code=child.exit_code, log_lines=child.log_lines())
        self._lose(child.role, error)

    def _lose(self, role: Role | None, error: EngineError, *, is_final: bool = False) -> None:
        """It is over, or broken: end what cannot go on, and say why, once. ``role``: of the child that is lost."""
        if self._is_ended or self._is_broken or not self._is_started:
            return
        rows = self.rows_in_flight(role) if role is not None else {}
        others = [other for other in self._roles if other != DETOKENIZER]
        is_mendable = role == DETOKENIZER and not self._family.ended(others)
        loss = Loss(error, rows, is_final=is_final, is_mendable=is_mendable)
        if loss.is_mendable:
            self._is_broken = True
            self._heartbeats.stop()
        else:
            self.give_up()
        self._on_loss(loss)

    # ------------------------------------------------------------ ends

    def give_up(self) -> None:
        """Kill the children, without waiting; ``end`` is still to be called."""
        self._mark_ended()
        self._family.kill()

    def kill_now(self) -> None:
        """End the children at once, from any thread, and with or without a loop that runs."""
        self._is_ended = True
        self._family.kill_and_reap()
        if self._loop is not None and self._loop.is_running() and not runs_here(self._loop):
            post(self._loop, self._close)  # its timers and sockets belong to its thread
        else:
            self._close()

    def _close(self) -> None:
        self._mark_ended()
        self._heartbeats.stop()
        if self._pump is not None:
            self._pump.cancel()
        self._launcher.close()

    async def end(self, polite_s: float) -> None:
        """End the children: ask, give them ``polite_s``, then kill. Harmless when repeated or never started."""
        self._mark_ended()
        self._heartbeats.stop()
        await self._family.end(polite_s)
        pump, self._pump = self._pump, None
        if pump is not None:
            await pump.stop()
        self._launcher.close()

    def _mark_ended(self) -> None:
        self._is_ended = True
        self._heartbeats.give_up()
        if self._handshake is not None:
            self._handshake.give_up()


def _failure(message: Message, error: UnencodableError) -> ToFrontend:
    """The answer to a message that cannot be encoded, where there is one; else raises the error."""
    words = f"it cannot be sent to the scheduler process: {error}"
    match message:
        case Submit(uid=uid):
            end = Finished(uid, FinishCode.FAILED, stage=_STAGE, message=words, ended_at=time.monotonic())
            return TextChunks(finished=[end])
        case Control(call_id=call_id):
            return Reply(call_id, False, words, stage=_STAGE)
        case _:
            raise error
