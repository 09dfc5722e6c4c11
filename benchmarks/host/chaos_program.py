"""What a program may do to the engine that it embeds, for ``chaos.py``: each in one class or function."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import psutil

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineDeadError, EngineStartupError
from aioengine.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asyncio import Handle
    from collections.abc import Callable, Sequence
    from types import FrameType

    from aioengine.api.stream import Stream
    from aioengine.frontend.engine_parts import Blueprint

PANIC: Final = "\x06"
"""The tokenizer panics when a text has this character."""

SLOW_PATTERNS: Final = (r"(\w+ ?)+!", r"(.*e){12}Q", r"(a|a|b|\w)+(e|i|\w)+#", r"([a-z ]+)*Z")
"""For ``stop_regex``: each takes exponential or high polynomial time on text that it does not match."""


class PanicException(BaseException):
    """As the Rust library of the tokenizers raises it."""


class PanickingTokenizer(Tokenizer):
    """A tokenizer that panics on some texts."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        if any(PANIC in text for text in texts):
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


class CallbackWatch:
    """Finds callbacks of this process's asyncio loops that use more than ``limit_s`` of their thread's CPU time.

    Garbage collections, which may begin anywhere and go through all objects of the program, are measured apart.
    """

    def __init__(self, limit_s: float) -> None:
        self.slow: list[str] = []
        self.longest_s = 0.0
        self.longest_collection_s = 0.0
        self._limit_s = limit_s
        self._plain = asyncio.events.Handle._run
        self._collecting = threading.local()

    def __enter__(self) -> CallbackWatch:
        watch, plain = self, self._plain

        def run(handle: Handle) -> None:
            watch._collecting.spent_s = 0.0
            begun_at = time.thread_time()
            plain(handle)
            watch._note(handle, time.thread_time() - begun_at - watch._collecting.spent_s)

        gc.callbacks.append(self._collect)
        asyncio.events.Handle._run = run  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.events.Handle._run = self._plain  # type: ignore[attr-defined]
        gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, info: object) -> None:
        if phase == "start":
            self._collecting.begun_at = time.thread_time()
            return
        spent_s = time.thread_time() - self._collecting.begun_at
        self.longest_collection_s = max(self.longest_collection_s, spent_s)
        self._collecting.spent_s = getattr(self._collecting, "spent_s", 0.0) + spent_s

    def _note(self, handle: Handle, spent_s: float) -> None:
        self.longest_s = max(self.longest_s, spent_s)
        if spent_s > self._limit_s:
            self.slow.append(f"a callback used {spent_s * 1e3:.0f} ms of CPU time: {handle!r}")


class AbortingSignalHandler:
    """A handler of SIGALRM that watches the engine and aborts requests, wherever it interrupts the main thread."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.num_calls = 0
        self.targets: list[Stream] = []
        self._engine = engine
        self._draw = random.Random(seed)

    def __enter__(self) -> AbortingSignalHandler:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.007)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num_calls += 1
        self._engine.stats()
        self._engine.abort_request(f"unknown-{self.num_calls}")
        if self.num_calls % 16 == 0:
            self._engine.health()
        if self.targets and self._draw.random() < 0.2:
            target = self._draw.choice(self.targets)
            self._draw.choice([target.abort, lambda: self._engine.abort_request(target.rid)])()


class AbortingFinalizer:
    """Garbage in a cycle, whose finalizer aborts one request and closes the stream of another."""

    def __init__(self, engine: AsyncEngine, aborted: Stream, closed: Stream) -> None:
        self._engine = engine
        self._aborted = aborted
        self._closed = closed
        self._cycle = self

    def __del__(self) -> None:
        self._engine.abort_request(self._aborted.rid)
        self._closed.close()


def use_up_descriptors(num_left: int) -> Callable[[], None]:
    """Lower the limit and open files until ``num_left`` descriptors are free. Returns what undoes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))
    held: list[int] = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:  # none is left
        for descriptor in held[:num_left]:
            os.close(descriptor)
        del held[:num_left]

    def undo() -> None:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return undo


def cancel_tasks(make_blueprint: Callable[[], Blueprint], seed: int) -> tuple[Counter[str], list[str]]:
    """Start an engine on a loop of its own, cancel its tasks there, and see that everything ends. Blocks."""
    return asyncio.run(_cancel_tasks(make_blueprint, random.Random(seed)))


async def _ask(engine: AsyncEngine) -> None:
    await engine.async_generate("x")


async def _cancel_tasks(make_blueprint: Callable[[], Blueprint], draw: random.Random) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    problems: list[str] = []
    engine = AsyncEngine.from_blueprint(make_blueprint)
    try:
        await engine.start()
    except EngineStartupError:  # no descriptor is left
        counts["starts refused"] += 1
        return counts, problems
    processes = [psutil.Process(pid) for pid in engine.get_all_child_pids()]
    calls = [asyncio.ensure_future(engine.async_generate("x", {"max_new_tokens": 2000})) for _ in range(3)]
    if draw.random() < 0.3:
        processes[0].kill()
    await asyncio.sleep(draw.random() * 0.1)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    own = sorted(task.get_name() for task in others if task.get_name().startswith("aioengine-"))
    chosen = draw.choice([None, *own])
    for task in others:
        if chosen in (None, task.get_name()):
            task.cancel()
            counts["cancelled tasks"] += 1
    try:
        async with asyncio.timeout(60.0):
            results = await asyncio.gather(*calls, return_exceptions=True)
            later = await asyncio.gather(_ask(engine), return_exceptions=True)
            await engine.shutdown()
            while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the end of a process has no event
    except TimeoutError:
        counts["hangs"] += 1
        problems.append(f"after its task {chosen or 'and all others'} was cancelled an engine did not come to its end")
        return counts, problems
    for result in (*results, *later):
        if not isinstance(result, EngineDeadError | asyncio.CancelledError):
            counts["mismatches"] += 1
            problems.append(f"after the task {chosen or 'and all others'} was cancelled a call ended with {result!r}")
    return counts, problems
