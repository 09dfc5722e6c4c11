"""Frontend: the engine in the user's process, shared by ``AsyncEngine`` and ``Engine``.

Calls are opened on any thread. After that, they change only on the engine's loop, in ``Calls``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast

from msgspec.structs import asdict

from aioengine.api import checks
from aioengine.errors import EngineClosedError, EngineDrainingError, EngineError, EngineStalledError
from aioengine.frontend import info
from aioengine.frontend.callers import closed, forked
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.frontend.calls.calls import Calls
from aioengine.frontend.calls.observers import Observer, Observers
from aioengine.frontend.calls.overload import CallerQueue, QueueLimits, Reservation
from aioengine.frontend.calls.reader import Reader
from aioengine.frontend.calls.slow_readers import SlowReaders
from aioengine.frontend.controls import Controls
from aioengine.frontend.engine_parts import EngineParts
from aioengine.frontend.intake.encoder import Encoder, PoolEncoder, TextSizes
from aioengine.frontend.intake.image_prompts import PromptImages
from aioengine.frontend.intake.request_checks import RequestChecks
from aioengine.frontend.intake.requests import MAX_TIMEOUT_S, CallRequest
from aioengine.frontend.live_weights import LiveWeights
from aioengine.frontend.loaded_adapters import LoadedAdapters
from aioengine.frontend.sessions.sessions import Sessions
from aioengine.frontend.throughput import Throughput
from aioengine.protocol.messages import FinishCode, Reply, Stats, TextChunks, ToFrontend
from aioengine.supervision.tasks import post, runs_here

STOP_TIMEOUT_S: Final = 5.0


class Frontend:
    """A started engine: opens calls, and delivers the messages of the processes. Created on the engine's loop.

    Implements ``ReaderActions``. Methods under "from any thread" may be called there; all others only on the loop.

    Attributes:
        images: the images of prompts; None: the model reads only text.
        weights: updates of the weights.
        failure: the error of all calls once the engine is dead or closed. Copies are raised, because a raised error
            keeps its frames alive, and all objects in them.
    """

    def __init__(self, parts: EngineParts, observers: list[Observer]) -> None:
        settings = parts.settings
        self.parts = parts
        self.loop = asyncio.get_running_loop()
        self._observers = Observers(observers, self.loop, settings.model.path)
        self.failure: EngineError | None = None
        self.last_stats: Stats | None = None
        self._throughput = Throughput(settings.log_level)
        self._lock = lock = threading.RLock()
        self.limits = QueueLimits(
            parts.blueprint.queue,
            max_running=settings.scheduler.max_running,
            max_total_tokens=parts.max_total_tokens * cast("int", parts.facts.get("num_replicas", 1)),
        )
        self.caller_queue = CallerQueue(self.limits, lock, self.loop)
        self.controls = Controls(parts.processes.send, abort_all=lambda: self.calls.abort_opened(self.calls.num_opened))
        self.weights = LiveWeights(
            self.controls,
            parts.processes,
            parts.facts,
            keeps_copies=parts.blueprint.keeps_tensors,
            has_one_runner=settings.runner.num_runners == 1,
        )
        self.adapters = LoadedAdapters(parts.blueprint.adapters, self.controls, lock)
        self.sessions = Sessions(parts, self.controls, lock, self.limits)
        self._pid = os.getpid()
        self._encoder = _encoder(parts)
        self._ended = asyncio.Event()
        self.images = None if parts.images is None else PromptImages(parts.images, self._encoder)
        self._checks = RequestChecks(parts, self._encoder, self.images)
        self.calls = Calls(self._checks, lock, self.limits, self.sessions)
        self.delivery = self.calls.delivery
        self.attachments = self.calls.attachments
        self._slow_readers = SlowReaders(parts.blueprint.delivery, self.calls)
        self._slow_readers.watch()

    # ------------------------------------------------------------ from any thread

    def open(self, make_request: Callable[[], CallRequest]) -> Reader:
        """Register a call and start it.

        1. Reserve capacity. If there is none, the call is refused before its arguments are checked.
        2. Make the request, and check it against the model.
        3. Register the call, and start it on the engine's loop.

        Raises:
            TypeError, ValueError: an argument is wrong, an id is in use, or the engine lacks a tokenizer.
            EngineError: the engine does not accept the call.
        """
        called_at, reservation, call = time.monotonic(), Reservation(self.limits), None
        try:
            with self._lock:
                self.limits.reserve(reservation)
            request = make_request()
            self._checks.check(request)
            call = Call(request, reservation, called_at, self.weights.loaded.version)
            self._observers.watch(call)
            reader = Reader(call, call.ready, lock=self._lock, actions=self)
            with self._lock:
                if request.adapters is not None:
                    self.adapters.open(request.adapters, prompts_fail_alone=request.prompts_fail_alone)
                self.calls.open(call)
            if runs_here(self.loop):
                self.calls.start(call)
            else:
                post(self.loop, self.calls.start, call)
        except BaseException:  # KeyboardInterrupt, too
            with self._lock:
                self.limits.release(reservation, time.monotonic())
            if call is not None:
                post(self.loop, self.calls.discard, call)
            raise
        return reader

    def check_can_wait(self, *, blocks: bool) -> None:
        """Raise an error if the engine could never wake this thread: it is in a fork, or blocks the engine's loop.

        ``blocks``: the thread blocks while it waits.
        """
        if blocks and runs_here(self.loop):
            raise RuntimeError("a call from the engine's own thread would wait for itself; hand it to another thread")
        if os.getpid() != self._pid:
            raise forked(self._pid)

    def leave(self, call: Call, ready: deque[CallRow], *, later: bool = False) -> None:
        if not call.is_attachable:
            call.leave()
        if runs_here(self.loop) and not later:
            self.calls.on_left(call, ready)
        else:
            post(self.loop, self.calls.on_left, call, ready)

    def on_read(self, call: Call) -> None:
        post(self.loop, self.calls.on_read, call)

    def abort(self, call: Call) -> None:
        post(self.loop, self.calls.end, [call], FinishCode.ABORT)

    def abort_request(self, rid: str | None, abort_all: bool) -> None:
        """End the live rows with an id, or all rows. Unknown ids are ignored, because their rows may have ended."""
        if checks.switch("abort_all", abort_all):
            post(self.loop, self.calls.abort_opened, self.calls.num_opened)
        elif rid is None:
            raise ValueError("abort_request needs a rid, or abort_all=True")
        elif not isinstance(cast("object", rid), str):
            raise checks.wrong_type("rid", "a string", rid)
        else:
            post(self.loop, self.calls.abort_named, str.__str__(rid), self.calls.num_opened)

    @property
    def state(self) -> str:
        """The state of the engine for ``health()``."""
        if self.failure is not None:
            names = {EngineClosedError: "closed", EngineStalledError: "stalled"}
            return names.get(type(self.failure), "dead")
        if self.parts.processes.is_recovering:
            return "recovering"
        return "running" if self.limits.refusal is None else "draining"

    def stats(self) -> dict[str, int]:
        """Return the last counters of the scheduler (zeros before its first report), and the frontend's counters."""
        counters = asdict(self.last_stats or Stats())
        del counters["sent_at"], counters["step_ended_at"]
        return counters | {
            "num_streams": sum(call.num_open for call in list(self.calls.opened)),
            "num_detokenizing": self.delivery.num_detokenizing,
            "num_sessions": len(self.sessions),
            "num_adapters": len(self.adapters),
            "num_restarts": self.parts.processes.num_restarts,
        }

    # ------------------------------------------------------------ from the processes, on the loop

    def on_messages(self, messages: Sequence[ToFrontend]) -> None:
        """Deliver the messages of a frame."""
        for message in messages:
            if isinstance(message, TextChunks):
                self.delivery.deliver(message)
            elif isinstance(message, Stats):
                self.last_stats = message
                self.calls.step_ended_at = message.step_ended_at
                self._throughput.record(message)
            elif isinstance(message, Reply):
                self.controls.answer(message)
        self.delivery.wake()

    def fail(self, error: EngineError) -> None:
        """The engine is dead, stalled or closed: all open and later calls raise ``error``."""
        if self.failure is not None:
            return
        self.failure = error
        with self._lock:
            self.limits.refuse(error)
        if not self.loop.is_closed():
            self.delivery.end_rows()
        for call in list(self.calls.opened):
            self.calls.fail(call, error)
        self.sessions.clear()
        self._slow_readers.stop()
        if not self.loop.is_closed():  # otherwise no task waits
            self.controls.fail(error)
            self._ended.set()

    async def server_info(self) -> dict[str, object]:
        """Return the engine's settings, and the scheduler's state."""
        reply = await self.controls.ask("server_info")
        parts = self.parts
        states = cast("dict[str, object] | list[dict[str, object]]", json.loads(reply.data) if reply.data else {})
        replicas = states if isinstance(states, list) else [states]
        return {
            "status": "ready" if self.failure is None else self.state,
            **info.settings_info(parts.settings, parts.facts, parts.max_total_tokens),
            "internal_states": [replica.get("stats", {}) for replica in replicas],
        }

    # ------------------------------------------------------------ the end

    async def wait_failed(self) -> EngineError | None:
        """Wait until the engine dies, and return its error; None: it was shut down."""
        await self._ended.wait()
        return None if isinstance(self.failure, EngineClosedError) else self.failure

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new calls and wait for the open calls; after ``timeout_s`` end them with reason ``shutdown``.

        Paused requests and requests suspended for slow readers continue, because otherwise they would never end.
        """
        if timeout_s is not None:
            timeout_s = checks.number("timeout", timeout_s, -MAX_TIMEOUT_S, MAX_TIMEOUT_S)
        with self._lock:
            self.limits.refuse(EngineDrainingError("the engine is draining and accepts no new requests"))
        self.controls.unpause_later()
        self._slow_readers.release()
        if not await self._become_idle(timeout_s):
            self.calls.end(list(self.calls.opened), FinishCode.SHUTDOWN)
            if not await self._become_idle(STOP_TIMEOUT_S):  # the scheduler hangs, or is being replaced
                for call in list(self.calls.opened):
                    self.calls.end_here(call, FinishCode.SHUTDOWN)
                await self.calls.submitter.wait_unstarted()
            return False
        return self.failure is None

    async def _become_idle(self, timeout_s: float | None) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.calls.opened:
                    self.calls.idle.clear()
                    await self.calls.idle.wait()
        return not self.calls.opened

    async def stop(self) -> None:
        """End the processes. Waiting calls raise ``EngineClosedError``."""
        self.fail(closed())
        self.attachments.clear(closed())
        images = None if self.images is None else self.images.start_close()
        self._encoder.close()
        await self.parts.processes.stop(STOP_TIMEOUT_S)
        self.weights.close()
        self.adapters.close()
        if images is not None:
            await asyncio.wait([asyncio.wrap_future(images)])
        # Readers on other threads wait for these rows, and the loop may end after this.
        await self.calls.submitter.wait_unstarted()

    def close_now(self, error: EngineError | None = None) -> None:
        """End processes and threads now, and the calls in the next iteration of the loop. From any thread.

        If the loop has ended, give ``error``: calls of other threads end here with this error.
        """
        if error is None:
            post(self.loop, _end_calls, self, closed())
        else:
            _end_calls(self, error)
        self._encoder.close()
        if self.images is not None:
            self.images.close()
        self.parts.processes.kill_now()


def _end_calls(frontend: Frontend, error: EngineError) -> None:
    """Fail every call with all its rows now, because this may be the last iteration of the loop, or after it."""
    with frontend._lock:
        frontend.limits.refuse(frontend.failure or error)
    frontend.attachments.clear(closed())  # no timer of a closed loop can forget them
    frontend.fail(error)
    frontend.calls.submitter.end_some(sys.maxsize)


def _encoder(parts: EngineParts) -> Encoder:
    model, tokenizer = parts.settings.model, parts.tokenizer
    if tokenizer is None:
        return Encoder(None)
    max_tokens = min(model.context_length, parts.max_total_tokens)
    sizes = None if parts.longest_token is None else TextSizes(max_tokens, parts.longest_token)
    in_text = str if parts.images is None else parts.images.model.family.in_text
    return Encoder(tokenizer, sizes, PoolEncoder(tokenizer, model.pooling, max_tokens, in_text), in_text)
