"""Frontend: the engine in the user's process, as both faces share it.

The faces (``engine.AsyncEngine`` and ``sync.Engine``) check and wait. Everything between a checked call and the
scheduler, and back, is here, or in the objects that are put together here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from aioengine import calls as open_calls
from aioengine.calls import Calls
from aioengine.config import QueueConfig, Settings
from aioengine.controls import Controls
from aioengine.encoder import Encoder
from aioengine.errors import EngineClosedError, EngineError, EngineStalledError
from aioengine.feeder import Feeder, PromptRules, deadlines_of, end_unbegun, expired_deadline
from aioengine.outputs import Reader
from aioengine.protocol.messages import Abort, FinishCode, Finished, Reply, Stats, TextChunks
from aioengine.router import Router
from aioengine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.asks import Ask
    from aioengine.calls import Call
    from aioengine.outputs import CallOutput
    from aioengine.protocol.messages import ToFrontend, ToScheduler
    from aioengine.supervision.supervisor import ProcessState

STOP_TIMEOUT_S: Final = 5.0
BACKSTOP_S: Final = 0.5
"""How long the scheduler has to end a request at its deadline before the frontend does it."""


class Processes(Protocol):
    """The supervisor, as the frontend sees it."""

    async def start(self) -> dict[str, object]: ...
    def send(self, messages: list[ToScheduler]) -> None: ...
    async def stop(self, timeout_s: float) -> None: ...
    def kill_now(self) -> None: ...
    def processes(self) -> list[ProcessState]: ...


class Running(Struct, frozen=True, kw_only=True):
    """What a started engine is made of. ``facts``: what the scheduler process told about itself."""

    settings: Settings
    queue: QueueConfig
    eos_token_ids: tuple[int, ...]
    stream_interval: int
    facts: dict[str, object]
    max_total_tokens: int
    processes: Processes
    tokenizer: Tokenizer | None


class Frontend:
    """The open calls of a started engine. Belongs to the loop on which it is made; see each method for threads.

    Attributes:
        failure: what every call gets from now on, once the engine is dead or closed.
    """

    def __init__(self, parts: Running) -> None:
        settings = parts.settings
        self.parts = parts
        self.loop = asyncio.get_running_loop()
        self.failure: EngineError | None = None
        self.last_stats: Stats | None = None
        self.router = Router(lock := threading.Lock())
        self.calls = Calls(
            parts.queue, max_running=settings.scheduler.max_running, max_total_tokens=parts.max_total_tokens
        )
        self.controls = Controls(self._send)
        self._lock = lock
        self._encoder = None if parts.tokenizer is None else Encoder(parts.tokenizer)
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        rules = PromptRules(
            vocab_size=settings.model.vocab_size,
            context_length=settings.model.context_length,
            max_total_tokens=parts.max_total_tokens,
            eos_token_ids=parts.eos_token_ids,
            stream_interval=parts.stream_interval,
            random_seed=settings.random_seed,
            max_rows_in_flight=2 * settings.scheduler.max_running,
        )
        self._feeder = Feeder(
            rules,
            encoder=self._encoder,
            lock=lock,
            calls=self.calls,
            router=self.router,
            submit=self._send,
            settle=self._settle,
        )

    # ------------------------------------------------------------ from any thread

    def open(self, ask: Ask) -> Reader:
        """Register a call and begin it.

        Raises:
            ValueError: ids outside the vocabulary, an id in use, text without a tokenizer.
            EngineError: the engine cannot take it.
        """
        called_at = time.monotonic()
        self._feeder.check(ask.prompts, ask.params)
        with self._lock:
            call = self.calls.open(ask, called_at)
        self._act(self._begin, call)
        return Reader(call.output, lock=self._lock, calls=self)

    def leave(self, output: CallOutput) -> None:
        self._act(self._leave, output)

    def drop(self, output: CallOutput) -> None:
        """Finalizers run anywhere, also while this thread holds the lock: only leave a note."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everything else
            self.loop.call_soon_threadsafe(self._leave, output)

    def feed(self, output: CallOutput) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._feed, output)

    def abort(self, output: CallOutput) -> None:
        self._act(self._abort_output, output)

    def abort_request(self, rid: str | None, abort_all: bool) -> None:
        """End the live rows that an id means, or all; unknown ids are no error, they have just ended."""
        if abort_all:
            self.abort_all()
        elif rid:
            self._act(self._abort_rid, rid)

    def abort_all(self, code: FinishCode = FinishCode.ABORT) -> None:
        self._act(self._abort_all, code)

    def _act(self, act: Callable[..., None], *arguments: object) -> None:
        """Now, on the engine's own thread, else a moment later."""
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_here = False
        if is_here:
            act(*arguments)
            return
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(act, *arguments)

    # ------------------------------------------------------------ calls, on the loop

    def _begin(self, call: Call) -> None:
        if self.failure is not None:
            self._fail_call(call, self.failure)
            return
        deadlines = deadlines_of(call)
        if deadlines:
            self._set_timer(call, min(deadlines.values()))
        self._feeder.feed(call)
        self._settle(call)  # a batch of nothing is over at once

    def _feed(self, output: CallOutput) -> None:
        call = self.calls.by_output.get(output)
        if call is not None:
            self._feeder.feed(call)

    def _settle(self, call: Call) -> None:
        """Close a call that is over, and free the rows that it leaves behind."""
        output = call.output
        if not output.is_over:
            return
        with self._lock:
            uids = [row.uid for row in output.live.values()]
            output.live.clear()
            self.calls.close(call, time.monotonic())
            is_idle = not self.calls.by_output
        self._forget(uids)
        if is_idle:
            self._idle.set()

    def _forget(self, uids: list[int]) -> None:
        """Nobody wants these rows any more."""
        for uid in uids:
            self.router.rows.pop(uid, None)
        if uids:
            self._send([Abort(uids)])

    def _leave(self, output: CallOutput) -> None:
        with self._lock:
            output.is_left = True
            output.ready.clear()
            output.wake()
        call = self.calls.by_output.get(output)
        if call is not None:
            self._settle(call)

    def _abort_output(self, output: CallOutput) -> None:
        call = self.calls.by_output.get(output)
        if call is not None:
            self._end_call(call, FinishCode.ABORT)

    def _abort_all(self, code: FinishCode) -> None:
        for call in list(self.calls.by_output.values()):
            self._end_call(call, code)

    def _abort_rid(self, rid: str) -> None:
        name = self.calls.find(rid)
        if name is None:
            return
        call, rows, _ = name
        if len(rows) == call.ask.num_rows:
            self._end_call(call, FinishCode.ABORT)
            return
        live = call.output.live
        call.aborted.update(position for position in rows if position >= call.num_begun)
        uids = [live[position].uid for position in rows if position in live]
        if uids:
            self._send([Abort(uids)])

    def _end_call(self, call: Call, code: FinishCode, matched: str | None = None) -> None:
        """End all its rows, with what they have: those that the scheduler has through it, the others here."""
        uids = [row.uid for row in call.output.live.values()]
        with self._lock:
            end_unbegun(call, code, matched=matched)
            call.output.begin()
        if uids:
            self._send([Abort(uids, code)])
        self._settle(call)

    # ------------------------------------------------------------ time

    def _set_timer(self, call: Call, when: float) -> None:
        call.timer = self.loop.call_later(max(0.0, when - time.monotonic()), self._expire, call)

    def _expire(self, call: Call) -> None:
        """End the rows that were not begun in time; what the scheduler has, it ends itself, or is given up later."""
        which = expired_deadline(call)
        now = time.monotonic()
        deadlines = deadlines_of(call)
        if which is not None and call.num_begun < call.ask.num_rows:
            with self._lock:
                end_unbegun(call, FinishCode.DEADLINE, matched=which)
                call.output.begin()
        total = deadlines.get("total")
        if total is not None and now >= total + BACKSTOP_S:
            self._give_up(call)
        self._settle(call)
        if call.output in self.calls.by_output:
            later = [when for when in deadlines.values() if when > now]
            if total is not None:
                later.append(total + BACKSTOP_S)
            if later:
                self._set_timer(call, min(later))

    def _give_up(self, call: Call) -> None:
        """The scheduler did not end these rows at their deadline: they end here, with what they have."""
        now = time.monotonic()
        with self._lock:
            rows = list(call.output.live.values())
            for row in rows:
                finished = Finished(row.uid, FinishCode.DEADLINE, "total", ended_at=now)
                call.output.end_row(row, finished, now)
        uids = [row.uid for row in rows]
        for uid in uids:
            self.router.rows.pop(uid, None)
        if uids:
            self._send([Abort(uids, FinishCode.DEADLINE)])

    # ------------------------------------------------------------ from the processes, on the loop

    def on_messages(self, messages: Sequence[ToFrontend]) -> None:
        """Hand out what a frame brought."""
        for message in messages:
            if isinstance(message, TextChunks):
                for row in self.router.deliver(message):
                    call = self.calls.by_output.get(row.output)
                    if call is not None and row.output.is_over:
                        self._settle(call)
                    elif call is not None and row.output.wants_feed and not row.output.is_stream:
                        self._feeder.feed(call)
            elif isinstance(message, Stats):
                self.last_stats = message
            elif isinstance(message, Reply):
                self.controls.answer(message)

    def fail(self, error: EngineError) -> None:
        """The engine is dead, stalled or closed: every call that waits, and every later one, gets ``error``."""
        if self.failure is not None:
            return
        self.failure = error
        with self._lock:
            self.calls.failure = error
        for call in list(self.calls.by_output.values()):
            self._fail_call(call, error)
        self.controls.fail(error)
        self._ended.set()

    def _fail_call(self, call: Call, error: EngineError) -> None:
        output = call.output
        with self._lock:
            if output.returns_exceptions and not output.is_over:
                now = time.monotonic()
                for row in list(output.live.values()):
                    finished = Finished(row.uid, FinishCode.FAILED, stage="engine", message=str(error), ended_at=now)
                    output.end_row(row, finished, now, error)
                end_unbegun(call, FinishCode.FAILED, error=error)
                output.begin()
            else:
                output.fail(error)
        self._settle(call)

    def _send(self, messages: Sequence[ToScheduler]) -> None:
        if self.failure is None:
            self.parts.processes.send(list(messages))

    # ------------------------------------------------------------ the end

    async def wait_failed(self) -> EngineError | None:
        """Wait until the engine dies, and return what happened; None where it was shut down."""
        await self._ended.wait()
        return None if isinstance(self.failure, EngineClosedError) else self.failure

    async def drain(self, timeout_s: float | None) -> bool:
        """Take nothing new and wait for what there is; after ``timeout_s`` end the rest with reason ``shutdown``."""
        with self._lock:
            self.calls.is_draining = True
        if not await self._become_idle(timeout_s):
            self._abort_all(FinishCode.SHUTDOWN)
            if not await self._become_idle(STOP_TIMEOUT_S):
                self.fail(EngineStalledError("the scheduler did not end the last requests in time; see health()"))
            return False
        return self.failure is None

    async def _become_idle(self, timeout_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.calls.by_output:
                    self._idle.clear()
                    await self._idle.wait()
        return not self.calls.by_output

    async def stop(self) -> None:
        """End the processes; calls that wait get ``EngineClosedError``."""
        self.fail(open_calls.closed())
        if self._encoder is not None:
            self._encoder.close()
        await self.parts.processes.stop(STOP_TIMEOUT_S)

    # ------------------------------------------------------------ what can be watched, from any thread

    def stats(self) -> dict[str, int]:
        """The last counters of the scheduler, with the frontend's own."""
        last = self.last_stats
        return {
            "num_running": last.num_running if last else 0,
            "num_waiting": last.num_waiting if last else 0,
            "num_streams": sum(output.num_open for output in list(self.calls.by_output)),
            "num_detokenizing": self.router.num_detokenizing,
            "num_pages": last.num_pages if last else 0,
            "num_free_pages": last.num_free_pages if last else 0,
            "num_cached_pages": last.num_cached_pages if last else 0,
            "num_preemptions": last.num_preemptions if last else 0,
            "num_restarts": 0,
            "num_steps": last.num_steps if last else 0,
            "prompt_tokens": last.prompt_tokens if last else 0,
            "cached_tokens": last.cached_tokens if last else 0,
            "output_tokens": last.output_tokens if last else 0,
            "num_finished": last.num_finished if last else 0,
            "num_aborted": last.num_aborted if last else 0,
        }
