"""Incarnation: one start of the children, from launch to loss or end.

After a loss, the supervisor starts another incarnation or ends the engine. Every incarnation has its own sockets and
epoch, so messages of an earlier incarnation cannot arrive. If only the detokenizer is lost, the incarnation can be
mended: a new detokenizer is started, and the scheduler drops its requests and continues in a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from aioengine.errors import EngineDeadError, EngineError, EngineStalledError
from aioengine.logs import log
from aioengine.protocol.codec import LostFrameError, UnencodableError
from aioengine.protocol.messages import (
    DETOKENIZER,
    SCHEDULER,
    Control,
    End,
    Failed,
    FinishCode,
    LogRecord,
    NewEpoch,
    Progress,
    Ready,
    Reply,
    Stats,
    Submit,
    TextChunks,
)
from aioengine.supervision.handshake import Handshake
from aioengine.supervision.launchers._process_child import KILL_WAIT_S
from aioengine.supervision.tasks import EngineTask, post, runs_here
from aioengine.transport.base import BacklogFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from aioengine.protocol.messages import Message, Role, ToFrontend, ToScheduler
    from aioengine.settings.config import Settings
    from aioengine.supervision.launchers._base import Launcher, RunningChild

    MakeLauncher = Callable[[Settings, Sequence[Role]], Launcher]

    OnStall = Callable[[Role, EngineStalledError], None]

NUM_TICKS: Final = 8
"""A child without a heartbeat for more than this number of ticks has stalled."""

MAX_WORK_S: Final = 600.0
"""How long a control call, such as writing a profile, may take before it counts as a stall."""


class Heartbeats:
    """The time of the last heartbeat of each child.

    Silence is counted in ticks of the event loop instead of clock time. If the program itself is stopped (by a terminal
    or a closed laptop), only one tick passes, and the children's messages are read before the next tick.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._tick_s = stall_timeout_s / NUM_TICKS
        self._seen_at: dict[Role, float] = {}
        self._num_silent: dict[Role, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def record(self, role: Role, now: float) -> None:
        """Record a heartbeat of a child: a message, or the end of a step."""
        self._seen_at[role] = now
        self._num_silent[role] = 0

    def excuse(self, role: Role) -> None:
        """Allow the next heartbeat of a child to be up to ``MAX_WORK_S`` late, because it has started long work."""
        self._num_silent[role] = -math.ceil(MAX_WORK_S / self._tick_s)

    def age_s(self, role: Role, now: float) -> float | None:
        """Return the seconds since the child's last heartbeat, or None if there was none."""
        seen_at = self._seen_at.get(role)
        return None if seen_at is None else now - seen_at

    def watch(self, roles: Iterable[Role], on_stall: OnStall) -> None:
        """Call ``on_stall`` once with the role and an error, when a child with one of these roles has stalled."""
        self._num_silent = dict.fromkeys(roles, 0)
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick, on_stall)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, on_stall: OnStall) -> None:
        self._timer = None
        for role in self._num_silent:
            self._num_silent[role] += 1
            if self._num_silent[role] > NUM_TICKS:
                silent_s = self.age_s(role, time.monotonic()) or 0.0
                text = f"the {role} process is alive, but made no progress for {silent_s:.1f} seconds (stall_timeout)"
                on_stall(role, EngineStalledError(f"{text}, so it was killed"))
                return
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick, on_stall)


MEND_TIMEOUT_S: Final = 20.0
"""Maximum time for a mend: the scheduler ends its step, then a detokenizer starts. Otherwise both are replaced."""


class ProcessState(Struct, frozen=True):
    """The state of a child in ``health()``. Ages are in seconds; None if there was no heartbeat or no step yet."""

    role: str
    pid: int
    alive: bool
    last_heartbeat_s: float | None
    last_step_s: float | None


class Loss(Struct, frozen=True):
    """The loss of a child.

    rows: the rows in the current steps of the child, uid -> position after its last token. is_final: another
    incarnation would fail too. is_mendable: only the detokenizer is lost.
    """

    error: EngineError
    rows: dict[int, int] = {}
    is_final: bool = False
    is_mendable: bool = False


class _State(Enum):
    STARTING = 0
    RUNNING = 1
    BROKEN = 2  # no detokenizer until the mend
    ENDED = 3
    FAILED = 4  # the engine has failed too: close when the last child has exited


class Incarnation:
    """Owns the children of one start. Belongs to one event loop.

    on_messages: receives ``TextChunks``, ``Stats`` and ``Reply``. on_loss: called once after the start, if a child dies
    or stalls, or messages cannot be handled. Before the call, the children are killed; afterwards ``end`` must be
    called. After a mendable loss the scheduler still runs, and ``mend`` may be called instead of ``end``.
    """

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[Role],
        make_launcher: MakeLauncher,
        *,
        startup_timeout_s: float,
        stall_timeout_s: float,
        on_messages: Callable[[list[ToFrontend]], None],
        on_loss: Callable[[Loss], None],
    ) -> None:
        self._roles = roles
        self._launcher = make_launcher(settings, roles)
        self._heartbeats = Heartbeats(stall_timeout_s)
        self._startup_timeout_s = startup_timeout_s
        self._max_unsent_tokens = settings.scheduler.chunk_tokens // 4
        self._on_messages = on_messages
        self._on_loss = on_loss
        self._on_progress: Callable[[Progress], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.RLock()
        self._replaced: RunningChild | None = None  # a detokenizer whose exit is not reported
        self._state = _State.STARTING
        self._handshake = Handshake(())
        self._receiving: EngineTask | None = None
        self._unsent: list[Message] = []
        self._num_unsent_tokens = 0
        self._flushing: asyncio.Handle | None = None
        self._step_ended_at = 0.0

    async def start(
        self, on_progress: Callable[[Progress], None] | None = None, on_launch: Callable[[], None] | None = None
    ) -> dict[str, object]:
        """Start the children, wait until all are ready, and return their facts. May be called once.

        on_progress: receives the progress of long work of the children. on_launch: called when all are started.

        Raises:
            EngineStartupError: a child failed. Has the child's message, and its traceback as a note. No child is left
                running.
        """
        self._on_progress = on_progress

        async def launch() -> None:
            await self._launcher.launch()
            if on_launch is not None:
                on_launch()

        return await self._run_stages([(self._roles, launch)])

    async def mend(self) -> dict[str, object]:
        """Replace the detokenizer, after a mendable loss.

        Raises:
            EngineStartupError, BacklogFullError: the mend failed. No child is left running.
        """
        self._startup_timeout_s = min(self._startup_timeout_s, MEND_TIMEOUT_S)
        for child in self._launcher.children:
            if child.role == DETOKENIZER:
                self._replaced = child
                child.kill()
                await _wait_for_exits([child], KILL_WAIT_S)
        return await self._run_stages(
            [
                ((SCHEDULER,), self._begin_epoch),
                ((DETOKENIZER,), self._launcher.launch_detokenizer),
                ((), self._launcher.check_links),
            ]
        )

    async def _begin_epoch(self) -> None:
        """Tell the scheduler to drop its requests and to continue in a new epoch. It answers with ``Ready``."""
        launcher = self._launcher
        launcher.epoch += 1
        launcher.sender.send([NewEpoch(launcher.epoch)])
        launcher.sender.begin(launcher.epoch)
        launcher.receiver.begin(launcher.epoch)

    async def _run_stages(
        self, stages: list[tuple[Collection[Role], Callable[[], Awaitable[None]]]]
    ) -> dict[str, object]:
        """For each stage, run its action, and wait until the children with its roles are ready."""
        self._loop = asyncio.get_running_loop()
        facts: dict[str, object] = {}
        try:
            for roles, act in stages:
                self._handshake = Handshake(roles)
                await act()
                if self._receiving is None or self._receiving.is_done:
                    self._receiving = EngineTask(
                        self._receive_messages(), name="aioengine-receive", on_failure=self._receiving_failed
                    )
                self._watch_children()
                for child in self._ended_children(roles):
                    self._handshake.child_ended(child)
                facts |= await self._handshake.wait(self._startup_timeout_s)
            self._state = _State.RUNNING
            # Rank 0 waits for the other ranks in every step, so it stalls if one of them does.
            self._heartbeats.watch([role for role in self._roles if role.rank == 0], self._lose)
            for child in self._ended_children(self._roles):  # exited after the handshake
                self._loop.call_soon(self._child_ended, child)
            return facts
        except GeneratorExit:  # the loop is closed, so nothing can be awaited
            self.kill_now()
            raise
        except BaseException:
            await self.end(exit_timeout_s=0.0)
            raise

    def process_states(self) -> list[ProcessState]:
        """Return the current state of each child."""
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

    def uids_in_flight(self, role: Role) -> dict[int, int]:
        """Return the rows in the current steps of the child with this role: uid -> position after its last token.

        If the child has exited, return the rows at its exit.
        """
        for child in self._launcher.children:
            if child.role == role:
                return child.uids_in_flight()
        return {}

    # ------------------------------------------------------------ messages

    def send(self, messages: Iterable[ToScheduler]) -> None:
        """Send messages to the scheduler in order, in the next iteration of the event loop.

        If the unsent prompts fill a quarter of a step, they are sent immediately. A program that submits a thousand
        requests takes long to submit all, and the scheduler computes the first requests in the meantime. If
        ``messages`` is empty, an empty frame is sent.
        """
        for message in messages:
            self._unsent.append(message)
            if isinstance(message, Submit):
                self._num_unsent_tokens += len(message.prompt_token_ids)
        if self._num_unsent_tokens >= self._max_unsent_tokens:
            self._flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send one frame. A loss is reported in the next iteration of the loop."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        messages, self._unsent, self._num_unsent_tokens = self._unsent, [], 0
        if self._state is not _State.RUNNING:
            return
        loop = asyncio.get_running_loop()
        frames = [messages]
        try:
            while frames:
                frame = frames.pop(0)
                try:
                    self._launcher.sender.send(frame)
                except UnencodableError as error:
                    if len(frame) == 1:
                        loop.call_soon(self._on_messages, [_failure(frame[0], error)])
                    else:  # only the message that cannot be encoded fails
                        frames = [[message] for message in frame]
        except BacklogFullError as error:
            loop.call_soon(self._lose, SCHEDULER, EngineStalledError(str(error)))
        except Exception as error:  # otherwise calls would wait forever for replies to lost messages
            loop.call_soon(self._fail, "messages for the scheduler could not be sent", error)

    async def _receive_messages(self) -> None:
        """Receive the messages of the children until cancelled."""
        while True:
            messages = await self._launcher.receiver.receive()
            now = time.monotonic()
            for_frontend: list[ToFrontend] = []
            for message in messages:
                match message:
                    case TextChunks():
                        if message.num_open is not None:
                            self._heartbeats.record(DETOKENIZER, now)
                        for_frontend.append(message)
                    case Stats():
                        self._heartbeats.record(SCHEDULER, now)
                        self._step_ended_at = message.step_ended_at
                        for_frontend.append(message)
                        self.send([])  # the number of this frame tells the scheduler whether an earlier frame was lost
                    case Reply():
                        self._heartbeats.record(SCHEDULER, now)
                        for_frontend.append(message)
                    case Progress():
                        self._handshake.receive(message)
                        if self._state is _State.RUNNING:
                            self._heartbeats.excuse(SCHEDULER)
                        elif self._on_progress is not None:
                            self._on_progress(message)
                    case Ready() | Failed():
                        self._handshake.receive(message)
                        self._heartbeats.record(message.role, now)
                    case LogRecord():
                        log(logging.getLogger(message.logger), message.level, "%s", message.message)
                    case _:
                        raise TypeError(f"{type(message).__name__} is not a message to the frontend")
            # In other states, the requests will be submitted again.
            if for_frontend and self._state in (_State.STARTING, _State.RUNNING):
                self._on_messages(for_frontend)

    # ------------------------------------------------------------ losses

    def _receiving_failed(self, error: EngineDeadError) -> None:
        """Handle the end of ``_receive_messages``. Waiting calls must end, because no message can arrive any more."""
        cause = error.__cause__
        if isinstance(cause, LostFrameError):
            self._fail("a message of the engine's processes was lost or damaged", cause, is_final=False)
        elif cause is not None:
            self._fail("messages of the engine's processes could not be handled", cause)
        else:
            if self._state is _State.BROKEN:
                # The program cancelled the task. ``_lose`` ignores other states, but this loss must be reported.
                self._state = _State.RUNNING
            self._handshake.fail(str(error))
            self._lose(None, error, is_final=True)

    def _fail(self, text: str, cause: BaseException, *, is_final: bool = True) -> None:
        """Fail the start, or report a loss of all children."""
        failure = EngineError(f"{text}: {cause!r}")
        failure.__cause__ = cause
        self._handshake.fail(str(failure))
        self._lose(None, failure, is_final=is_final)

    def _watch_children(self) -> None:
        """Watch the exits of all children. A child that is already watched is not watched again."""
        for child in self._launcher.children:
            child.watch(partial(self._child_ended, child))

    def _ended_children(self, roles: Collection[Role]) -> list[RunningChild]:
        """Return the children with these roles that have exited."""
        return [child for child in self._launcher.children if child.role in roles and not child.is_alive]

    def _child_ended(self, child: RunningChild) -> None:
        if self._state is _State.FAILED and not any(other.is_alive for other in self._launcher.children):
            self._close()  # otherwise the loop would keep a failed engine alive until its shutdown
        is_known = child in self._launcher.children and child is not self._replaced
        if self._state in (_State.ENDED, _State.FAILED) or not is_known:
            return
        try:
            if self._state is not _State.RUNNING:
                self._handshake.child_ended(child)
                return
            log_lines = child.log_lines()
            error = EngineDeadError(
                str(child.role),
                pid=child.pid,
                exit_code=child.exit_code,
                log_lines=log_lines,
                reason=child.final_reason,
            )
            self._lose(child.role, error, is_final=bool(child.final_reason))
        except Exception as cause:  # the event loop would only log it, and calls would wait forever
            self._fail(f"the exit of the {child.role} process could not be handled", cause)

    def _lose(self, role: Role | None, error: EngineError, *, is_final: bool = False) -> None:
        """End the children that cannot continue, and report the loss once. role: role of the lost child."""
        if self._state is not _State.RUNNING:
            return
        rows: dict[int, int] = {}
        is_mendable = False
        try:
            if role is not None:  # the other ranks compute the rows of the scheduler
                rows = self.uids_in_flight(SCHEDULER if role.rank else role)
            scheduler_roles = [other for other in self._roles if other != DETOKENIZER]
            is_mendable = role == DETOKENIZER and not self._ended_children(scheduler_roles)
            if is_mendable:
                self._state = _State.BROKEN
                self._heartbeats.stop()
            else:
                self.give_up()
        except Exception as cause:  # without a report of the loss, calls would wait forever
            error.__cause__ = cause
            is_final, is_mendable = True, False
        self._on_loss(Loss(error, rows, is_final=is_final, is_mendable=is_mendable))

    # ------------------------------------------------------------ ends

    def give_up(self, *, with_engine: bool = False) -> None:
        """Kill the children without waiting. ``end`` must still be called.

        with_engine: the engine fails too. Then everything is closed after the last exit, and ``end`` is optional.
        """
        self._mark_ended()
        for child in self._launcher.children:
            child.kill()
        if with_engine:
            self._state = _State.FAILED
            for child in self._launcher.children:
                asyncio.get_running_loop().call_soon(self._child_ended, child)

    def kill_now(self) -> None:
        """Kill the children, from any thread, with or without a running loop."""
        self._state = _State.ENDED
        for child in self._launcher.children:
            child.kill()
        for child in self._launcher.children:
            child.reap(KILL_WAIT_S)
        loop, is_posted = self._loop, False
        if loop is not None and loop.is_running() and not runs_here(loop):
            is_posted = post(loop, self._close)  # timers and sockets belong to the loop's thread
        if not is_posted:
            self._close()

    def _close(self) -> None:
        with self._closing:  # several threads may notice that the loop is closed
            self._mark_ended()
            if self._receiving is not None:
                self._receiving.cancel()
            self._launcher.close()

    async def end(self, exit_timeout_s: float) -> None:
        """Ask the children to exit, wait up to ``exit_timeout_s``, then kill them. May be repeated."""
        self._mark_ended()
        self._watch_children()  # a cancelled start may not have called it
        children = self._launcher.children
        if exit_timeout_s > 0:
            for child in children:
                child.terminate()
            await _wait_for_exits(children, exit_timeout_s)
        for child in children:
            child.kill()
        await _wait_for_exits(children, KILL_WAIT_S)
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            await receiving.stop()
        self._close()

    def _mark_ended(self) -> None:
        self._state = _State.ENDED
        self._heartbeats.stop()
        self._handshake.fail("the engine was shut down while it started")


async def _wait_for_exits(children: Iterable[RunningChild], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for child in list(children):
                if child.is_alive:
                    await child.exited.wait()


def _failure(message: Message, error: UnencodableError) -> ToFrontend:
    """Return the failed result of a message that cannot be encoded. Raise the error if the message has no result."""
    text = f"it cannot be sent to the scheduler process: {error}"
    match message:
        case Submit(uid=uid):
            end = End(uid, FinishCode.FAILED, stage="submit", message=text, ended_at=time.monotonic())
            return TextChunks(ended=[end])
        case Control(call_id=call_id):
            return Reply(call_id, False, text, stage="submit")
        case _:
            raise error
