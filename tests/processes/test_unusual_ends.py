"""Engines that are shut down on other threads, half-way, or never. No call waits forever, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import pytest

from aioengine.api import sync
from aioengine.api.sync import Engine
from aioengine.errors import EngineClosedError, EngineDeadError
from aioengine.frontend import portal
from aioengine.supervision import tasks
from aioengine.supervision.launchers._process_child import ProcessChild
from aioengine.supervision.tasks import EngineTask
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine, fake_engine
from tests.engine.test_interrupts import RaiseAtCall
from tests.kit.hub_double import HubDouble
from tests.kit.source import ROOT
from tests.kit.waiting import until, wait_until
from tests.processes.restart_kit import frontend_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.api.engine import AsyncEngine

process = pytest.mark.process

NUM_ROWS = 5000
LONG = {"max_new_tokens": 1000}


def read_batch(llm: Engine, outcome: list[object], **options: object) -> None:
    """Return the result of a batch of thousands of rows."""
    try:
        answers = llm.generate(["a"] * NUM_ROWS, LONG, **options)  # type: ignore[call-overload]
        outcome += [error for error in answers if isinstance(error, Exception)]
    except Exception as error:
        outcome.append(error)


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


ENDS: dict[str, tuple[Callable[[Engine], Callable[[], object]], type[Exception]]] = {
    "shut down there": (lambda llm: llm.shutdown, EngineClosedError),
    "all tasks cancelled": (lambda _: cancel_all, EngineDeadError),
    "loop stopped": (lambda llm: llm._portal.loop.stop, EngineDeadError),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("options", [{}, {"return_exceptions": True}], ids=["whole", "in place"])
@pytest.mark.parametrize("end", ENDS)
def test_end_on_the_loop_thread_ends_all_rows(end: str, options: dict[str, object]) -> None:
    llm, outcome = fake_engine(max_queued=2 * NUM_ROWS), list[object]()
    reading = threading.Thread(target=read_batch, args=(llm, outcome), kwargs=options, daemon=True)
    reading.start()
    time.sleep(0.1)
    make_end, expected = ENDS[end]
    llm._portal.loop.call_soon_threadsafe(make_end(llm))
    reading.join(20)
    assert not reading.is_alive()
    assert outcome
    assert {type(error) for error in outcome} == {expected}
    with pytest.raises(expected):
        llm.generate("a", LONG)
    llm.shutdown()


# ---------------------------------------------------------------- shutdowns that are cancelled


@pytest.mark.parametrize("how", ["cancelled", "no time"])
async def test_shutdown_that_is_cancelled_before_its_first_step_ends_every_call(how: str) -> None:
    engine = fake_async_engine()
    await engine.start()
    calls = [engine.async_generate("a", LONG), engine.async_generate("a", LONG, stream=True)]
    if how == "cancelled":
        ending = asyncio.ensure_future(engine.shutdown())
        ending.cancel()
        await asyncio.wait([ending])
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.shutdown(), 0)
    async with asyncio.timeout(30):
        for call in calls:
            with pytest.raises(EngineClosedError):
                await call
        await engine.shutdown()


async def test_cancelled_shutdown_ends_every_call() -> None:
    engine = fake_async_engine(max_queued=2 * NUM_ROWS)
    await engine.start()
    whole = asyncio.ensure_future(engine.async_generate("a", LONG))
    batch = asyncio.ensure_future(engine.async_generate(["a"] * NUM_ROWS, LONG, return_exceptions=True))
    await asyncio.sleep(0.01)
    ending = asyncio.ensure_future(engine.shutdown())
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "aioengine-shutdown"]
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(EngineClosedError):
            await whole
        assert {type(error) for error in await batch if isinstance(error, Exception)} == {EngineClosedError}
        with contextlib.suppress(asyncio.CancelledError):
            await ending
    assert engine.health()["state"] == "closed"


# ---------------------------------------------------------------- tasks


async def ignore_cancellation(is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await is_over.wait()


@pytest.mark.parametrize("method", ["stop", "wait"])
async def test_task_that_does_not_end_is_given_up(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tasks, "END_TIMEOUT_S", 0.05)
    is_over, failures = asyncio.Event(), list[EngineDeadError]()
    task = EngineTask(ignore_cancellation(is_over), name="aioengine-deaf", on_failure=failures.append)
    await asyncio.sleep(0)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(30):
            await (task.stop() if method == "stop" else task.wait())
    assert "'aioengine-deaf' did not end within 0.05 s" in caplog.text
    is_over.set()
    await task.wait()
    assert failures == []


async def test_task_is_cancelled_from_another_thread_at_once() -> None:
    failures = list[EngineDeadError]()
    task = EngineTask(asyncio.sleep(60), name="aioengine-work", on_failure=failures.append)
    asyncio.get_running_loop().set_debug(True)  # tasks refuse other threads in debug mode
    await asyncio.sleep(0)
    await asyncio.to_thread(task.cancel)
    async with asyncio.timeout(30):
        with contextlib.suppress(asyncio.CancelledError):
            await task.wait()
    assert task.is_done
    assert failures == []


# ---------------------------------------------------------------- children


@process
async def test_signal_handler_may_poll_a_child_during_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_async_engine(processes=True) as engine:
        child = frontend_of(engine).parts.processes._incarnation._launcher.children[0]  # type: ignore[attr-defined]
        assert isinstance(child, ProcessChild)
        plain, seen = os.waitpid, list[bool]()

        def interrupted(pid: int, options: int) -> tuple[int, int]:
            if not seen:
                seen.append(True)
                seen.append(child.is_alive)
            return plain(pid, options)

        monkeypatch.setattr(os, "waitpid", interrupted)
        looking = asyncio.to_thread(lambda: child.is_alive)
        async with asyncio.timeout(30):
            assert await looking
        assert seen == [True, True]


# ---------------------------------------------------------------- forgotten engines


async def started(*, has_stream: bool) -> tuple[weakref.ref[AsyncEngine], list[psutil.Process]]:
    """Start an engine, and return no reference to it."""
    engine = fake_async_engine(processes=True)
    await engine.start()
    if has_stream:
        await anext(engine.async_generate("a", LONG, stream=True))
    return weakref.ref(engine), [psutil.Process(pid) for pid in engine.get_all_child_pids()]


def assert_gone(children: list[psutil.Process]) -> None:
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@process
@pytest.mark.filterwarnings("ignore:.*was not shut down:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("has_stream", [False, True])
async def test_engine_that_is_forgotten_on_its_running_loop_is_collected(has_stream: bool) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    forgotten, children = await started(has_stream=has_stream)
    gc.collect()
    assert forgotten() is None
    assert_gone(children)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= num_fds)
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("aioengine")])


@process
@pytest.mark.filterwarnings("ignore:.*was not shut down:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_closed", [True, False])
def test_engine_that_is_forgotten_with_its_loop_is_collected(is_closed: bool) -> None:
    """Also if a task still waits for its answer."""

    async def main() -> tuple[weakref.ref[AsyncEngine], list[psutil.Process]]:
        engine = fake_async_engine(processes=True, step_time_s=0.01)
        await engine.start()
        waiting = asyncio.ensure_future(engine.async_generate("a", LONG))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        return weakref.ref(engine), [psutil.Process(pid) for pid in engine.get_all_child_pids()]

    loop = asyncio.new_event_loop()
    forgotten, children = loop.run_until_complete(main())
    if is_closed:
        loop.close()
    del loop
    gc.collect()
    assert forgotten() is None
    assert_gone(children)


async def died() -> weakref.ref[AsyncEngine]:
    """Let an engine die, and return no reference to it."""
    engine = fake_async_engine(processes=True, max_restarts=0)
    await engine.start()
    call = engine.async_generate("a", LONG)
    os.kill(engine.get_all_child_pids()[0], signal.SIGKILL)
    for waiting in (call, engine.wait_failed()):
        with contextlib.suppress(EngineDeadError):
            await waiting
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            engine.async_generate("a", LONG)
    return weakref.ref(engine)


@process
@pytest.mark.filterwarnings("ignore:.*was not shut down:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_engine_that_died_is_collected_without_a_shutdown() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    forgotten = await died()

    def is_gone() -> bool:
        gc.collect()
        return forgotten() is None and len(os.listdir("/proc/self/fd")) <= num_fds

    await until(is_gone)
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("aioengine")])


# ---------------------------------------------------------------- programs that end

HEAD = """
import asyncio, gc, os, signal, sys, threading, time
from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError
from aioengine.supervision import tasks
from aioengine.api.sync import Engine
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine, fake_engine
from aioengine.testing.faults import Faults

tasks.MAX_EXIT_S = 1000.0  # for work of tokenizers: it does not wait for a start

def download():
    print("downloading", flush=True)
    time.sleep(1000)

def start(prepare=FakeSetup(faults=Faults(start_s=1000.0)).blueprint):
    try:
        Engine.from_blueprint(prepare)
    except EngineClosedError:
        pass
"""

STARTS = {
    "a download on another thread": "threading.Thread(target=start, args=(download,), daemon=True).start()",
    "processes on another thread": "threading.Thread(target=start, daemon=True).start()",
    "a download of an asynchronous engine": """
async def main():
    asyncio.ensure_future(AsyncEngine.from_blueprint(download).start())
    await asyncio.sleep(1)
asyncio.run(main())
""",
}


def program(text: str, place: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(place), "TMPDIR": str(place)}
    command = [sys.executable, "-W", "error", "-c", HEAD + text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


@process
@pytest.mark.parametrize("name", STARTS)
def test_program_ends_soon_although_an_engine_starts(name: str, tmp_path: Path) -> None:
    running = program(STARTS[name] + "\ntime.sleep(1.5)\nprint('over', flush=True)", tmp_path)
    assert running.stdout is not None
    while (line := running.stdout.readline()) not in ("over\n", ""):
        pass
    children = psutil.Process(running.pid).children(recursive=True)
    _, err = running.communicate(timeout=90)
    assert (line, running.returncode, err) == ("over\n", 0, "")
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


@process
def test_ctrl_c_during_a_download_ends_the_program_soon(tmp_path: Path) -> None:
    running = program("Engine.from_blueprint(download)", tmp_path)
    assert running.stdout is not None
    assert running.stdout.readline() == "downloading\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=90)
    assert running.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


@process
def test_ctrl_c_during_a_download_from_the_hub_ends_the_program_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": b"{}", **{f"{number}.safetensors": b"x" * 1000 for number in range(20)}}
    with HubDouble(files, stuck="*.safetensors").serving() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        running = program("Engine('owner/name')", tmp_path)
        assert hub.has_begun.wait(30)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=90)
    assert running.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err.splitlines()  # Python may warn afterwards of a temporary folder of the hub


FORKS = {
    "exits": "sys.exit(0)",
    "collects": "del llm; gc.collect(); sys.exit(0)",
    "shuts down": "llm.shutdown(); sys.exit(0)",
    "ends its launcher": """
for launcher in [one for one in gc.get_objects() if type(one).__name__ == "ProcessLauncher"]:
    launcher.close()
sys.exit(0)
""",
}


@process
def test_forks_remove_no_files_of_their_parent(tmp_path: Path) -> None:
    text = f"""
llm = fake_engine(processes=True)
for name, text in {FORKS!r}.items():
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        exec(text)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name
[folder] = [entry for entry in os.listdir(os.environ["XDG_RUNTIME_DIR"]) if entry.startswith("aioengine-")]
for pid in llm.get_all_child_pids():
    os.kill(pid, signal.SIGKILL)
assert llm.generate("a", {{"max_new_tokens": 5}})["meta_info"]["completion_tokens"] == 5
llm.shutdown()
"""
    running = program(text, tmp_path)
    _, err = running.communicate(timeout=90)
    assert running.returncode == 0, err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


SHUTDOWNS = """
import logging
logging.disable(logging.CRITICAL)
threading.excepthook = lambda _: None
sys.setswitchinterval(1e-6)
for end in 3 * [lambda loop: loop.stop(), lambda loop: [task.cancel() for task in asyncio.all_tasks(loop)]]:
    llm = fake_engine(processes=True)
    threads = [threading.Thread(target=llm.shutdown) for _ in range(4)]
    loop = llm._portal.loop
    loop.call_soon_threadsafe(end, loop)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@process
def test_threads_that_shut_down_while_the_loop_ends_close_everything_once(tmp_path: Path) -> None:
    """libzmq aborts the program if two threads close the same sockets."""
    running = program(SHUTDOWNS, tmp_path)
    _, err = running.communicate(timeout=90)
    assert (running.returncode, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- constructors


def threads_but(before: set[threading.Thread]) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread not in before and thread.is_alive()}


@process
@pytest.mark.filterwarnings("ignore:an Engine was not shut down:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere_in_a_constructor_leaves_nothing_that_runs() -> None:
    blueprint = FakeSetup().blueprint
    files = (sync.__file__, portal.__file__)
    before, num_places, is_raised = set(threading.enumerate()), 0, True
    while is_raised:
        num_places, kept = num_places + 1, None
        with RaiseAtCall(num_places, *files) as injected, contextlib.suppress(KeyboardInterrupt):
            kept = Engine.from_blueprint(blueprint)
        is_raised = injected.is_raised
        if kept is not None:  # nothing was raised in the last round
            kept.shutdown()
        assert wait_until(lambda: not threads_but(before)), (num_places, threads_but(before))
    assert num_places > 20


@process
@pytest.mark.filterwarnings("ignore:coroutine 'Frontend.stop' was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:an Engine was not shut down:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", range(1, 12))
def test_interrupts_of_a_failed_constructor_leave_nothing_that_runs(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt arrives while the started parts are closed, at one of many places."""
    before = set(threading.enumerate())
    injected = RaiseAtCall(place, sync.__file__, portal.__file__, weakref.__file__)

    class Started(sync._EngineLoop):
        def start(self, *arguments: Any) -> NoReturn:
            super().start(*arguments)
            injected.__enter__()
            raise KeyboardInterrupt

    monkeypatch.setattr(sync, "_EngineLoop", Started)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            Engine.from_blueprint(FakeSetup().blueprint)
        finally:
            injected.__exit__()
    assert injected.is_raised
    assert wait_until(lambda: not threads_but(before)), threads_but(before)
    gc.collect()  # a coroutine that was interrupted before its start warns
