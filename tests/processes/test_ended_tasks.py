"""The engine's tasks in the user's process. If a task ends for any reason, all waiting calls end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, NoReturn

import psutil
import pytest

from aioengine import plugins
from aioengine.errors import EngineClosedError, EngineDeadError, EngineError
from aioengine.logs import log
from aioengine.supervision.supervisor import Supervisor
from aioengine.supervision.tasks import EngineTask
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.waiting import until
from tests.processes.restart_kit import ANSWERS, ask_all, frontend_of, undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine.api.engine import AsyncEngine

process = pytest.mark.process
LONG = {"max_new_tokens": 1000}


def supervisor_of(engine: AsyncEngine) -> Supervisor:
    supervisor = frontend_of(engine).parts.processes
    assert isinstance(supervisor, Supervisor)
    return supervisor


def kill_scheduler(engine: AsyncEngine) -> None:
    supervisor_of(engine)._incarnation._launcher.children[0].kill()


class RaisingHandler(logging.Handler):
    """A log handler of the program that fails."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def emit(self, record: logging.LogRecord) -> NoReturn:
        raise self._error("the log is full")


@contextlib.contextmanager
def raising_log_handler(name: str, error: type[BaseException]) -> Iterator[None]:
    handler, logger = RaisingHandler(error), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# ---------------------------------------------------------------- recovery


async def test_failed_replacement_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, max_restarts=5) as engine:
        supervisor = supervisor_of(engine)
        make, failures = supervisor._make, [OSError("no file descriptor is free"), RuntimeError("no thread is free")]

        def fail_twice(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return make(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(supervisor, "_make", fail_twice)
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["num_streams"])
        kill_scheduler(engine)
        assert await asking == expected
        assert failures == []


async def test_short_shortage_does_not_use_up_the_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, max_restarts=3) as engine:
        supervisor, over_at = supervisor_of(engine), time.monotonic() + 0.2
        make = supervisor._make

        def fail_for_a_while(*arguments: object) -> object:
            if time.monotonic() < over_at:
                raise OSError("no file descriptor is free")
            return make(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(supervisor, "_make", fail_for_a_while)
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["num_streams"])
        kill_scheduler(engine)
        assert await asking == expected


@pytest.mark.parametrize("step", ["_make", "end"])
async def test_replacement_that_always_fails_ends_all_calls(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise OSError("no file descriptor is free")

    async with fake_async_engine(ANSWERS, max_restarts=2) as engine:
        supervisor = supervisor_of(engine)
        calls = [asyncio.ensure_future(engine.async_generate("a story", LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor if step == "_make" else supervisor._incarnation, step, fail)
            kill_scheduler(engine)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert isinstance(error.__cause__, OSError)
        assert engine.health()["state"] == "dead"


async def test_replacement_does_not_search_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the package may be removed, or no file descriptor may be free to list it."""
    expected, names = await undisturbed(has_answers=True), plugins.names
    async with fake_async_engine(ANSWERS) as engine:
        monkeypatch.setattr(plugins, "names", lambda folder: [] if folder.startswith("supervision") else names(folder))
        asking = asyncio.create_task(ask_all(engine, stream=False))
        await until(lambda: engine.stats()["num_streams"])
        kill_scheduler(engine)
        assert await asking == expected


async def test_exception_while_a_loss_is_recorded_ends_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise MemoryError

    async with fake_async_engine(ANSWERS) as engine:
        call = asyncio.ensure_future(engine.async_generate("a story", LONG))
        await asyncio.sleep(0)
        monkeypatch.setattr(supervisor_of(engine).ledger, "crash", fail)
        kill_scheduler(engine)
        with pytest.raises(EngineDeadError) as raised:
            await call
        assert isinstance(raised.value.__cause__, MemoryError)


RAISED = pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])


@RAISED
async def test_log_handler_that_raises_does_not_stop_a_replacement(
    error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = await undisturbed(has_answers=True)
    with raising_log_handler("aioengine.supervision", error):
        async with fake_async_engine(ANSWERS) as engine:
            asking = asyncio.create_task(ask_all(engine, stream=True))
            await until(lambda: engine.stats()["num_streams"])
            kill_scheduler(engine)
            assert await asking == expected
    assert "the log is full" in capsys.readouterr().err


@RAISED
def test_exceptions_of_log_handlers_are_printed(error: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    with raising_log_handler("aioengine.testing", error):
        log(logging.getLogger("aioengine.testing"), logging.ERROR, "%d of %d", 1, 2)
    printed = capsys.readouterr().err
    assert f"{error.__name__}: the log is full" in printed
    assert "Message: '%d of %d'" in printed


# ---------------------------------------------------------------- tasks that are cancelled


def engine_tasks() -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("aioengine-")]


@process
async def test_engine_whose_tasks_are_all_cancelled_is_dead_at_once() -> None:
    engine = fake_async_engine(ANSWERS, processes=True)
    await engine.start()
    pids = [process["pid"] for process in engine.health()["processes"]]
    calls = [engine.async_generate("a story", LONG) for _ in range(3)]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.health()["state"] == "dead"
    for call in [*calls, engine.async_generate]:
        with pytest.raises(EngineDeadError, match="task 'aioengine-receive' was cancelled") as raised:
            await (call if not callable(call) else call("a story", LONG))
        assert (raised.value.role, raised.value.pid) == ("frontend", os.getpid())
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    await engine.shutdown()
    assert engine_tasks() == []


@process
async def test_recovery_that_is_cancelled_ends_every_call() -> None:
    engine = fake_async_engine(ANSWERS, processes=True)
    await engine.start()
    call = asyncio.ensure_future(engine.async_generate("a story", LONG))
    await asyncio.sleep(0)
    kill_scheduler(engine)
    await until(lambda: supervisor_of(engine)._recovery)
    [recovery] = [task for task in asyncio.all_tasks() if task.get_name() == "aioengine-recovery"]
    recovery.cancel()
    with pytest.raises(EngineDeadError, match="task 'aioengine-recovery' was cancelled"):
        await call
    pids = engine.get_all_child_pids()
    await engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@process
async def test_engine_is_dead_if_its_receiver_is_cancelled_during_recovery() -> None:
    async with fake_async_engine(ANSWERS, processes=True) as engine:
        call = asyncio.ensure_future(engine.async_generate("a story", LONG))
        await asyncio.sleep(0)
        supervisor_of(engine)._incarnation._launcher.children[1].kill()
        await until(lambda: supervisor_of(engine)._recovery)
        [receiving] = [task for task in engine_tasks() if task.get_name() == "aioengine-receive"]
        receiving.cancel()
        with pytest.raises(EngineDeadError, match="task 'aioengine-receive' was cancelled"):
            await call


@process
async def test_shutdown_that_is_cancelled_leaves_no_process() -> None:
    engine = fake_async_engine(ANSWERS, processes=True)
    await engine.start()
    pids = engine.get_all_child_pids()
    ending = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ending
    await engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not engine.is_alive


@process
def test_end_of_asyncio_run_leaves_no_process() -> None:
    """``asyncio.run`` cancels all remaining tasks."""

    async def forget_to_shut_down() -> AsyncEngine:
        engine = fake_async_engine(ANSWERS, processes=True)
        await engine.start()
        return engine

    engine = asyncio.run(forget_to_shut_down())
    assert engine.health()["state"] == "dead"
    asyncio.run(until(lambda: not engine.get_all_child_pids()))
    asyncio.run(engine.shutdown())


@process
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # the loop has no time for some
@pytest.mark.parametrize("moment", ["start", "recovery"])
def test_closed_loop_leaves_no_process(moment: str) -> None:
    close_loop(moment)
    gc.collect()  # here, because the warnings would fail another test


def close_loop(moment: str) -> None:
    engine, loop = fake_async_engine(ANSWERS, processes=True), asyncio.new_event_loop()
    others = set(psutil.Process().children())
    if moment == "start":
        starting = loop.create_task(engine.start())
        loop.run_until_complete(until(lambda: len({*psutil.Process().children()} - others) >= 2))
        assert not starting.done()
    else:
        loop.run_until_complete(engine.start())
        kill_scheduler(engine)
        loop.run_until_complete(until(lambda: engine.health()["state"] == "recovering"))
    children = list({*psutil.Process().children()} - others)
    loop.close()
    asyncio.run(engine.shutdown())
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    asyncio.run(engine.shutdown())


@process
def test_stream_that_is_read_in_a_fork_raises() -> None:
    with fake_engine() as engine:
        engine.pause_generation("in_place")
        stream = engine.generate("a", stream=True)
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            try:
                next(stream)
            except EngineClosedError:
                os._exit(17 if engine.health()["state"] == "closed" and not engine.is_alive else 18)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        engine.continue_generation()
        assert next(stream)["text"]


@pytest.mark.parametrize("error", [None, KeyError("x"), asyncio.CancelledError()])
async def test_engine_task_reports_every_end_except_stop(error: BaseException | None) -> None:
    failures: list[EngineDeadError] = []

    async def work() -> None:
        if error is not None:
            raise error

    task = EngineTask(work(), name="aioengine-work", on_failure=failures.append)
    await until(lambda: task.is_done)
    await asyncio.sleep(0)
    assert [failure.__cause__ for failure in failures] == (
        [] if error is None else [None if isinstance(error, asyncio.CancelledError) else error]
    )
    stopped = EngineTask(asyncio.sleep(60), name="aioengine-work", on_failure=failures.append)
    await stopped.stop()
    assert len(failures) == (error is not None)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("error", [RecursionError("too deep"), OSError("no buffer is free"), KeyError("x")])
async def test_messages_that_cannot_be_sent_end_every_call(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(messages: object) -> NoReturn:
        raise error

    async with fake_async_engine(ANSWERS) as engine:
        call = asyncio.ensure_future(engine.async_generate("a story", LONG))
        monkeypatch.setattr(supervisor_of(engine)._incarnation._launcher.sender, "send", fail)
        with pytest.raises(EngineError, match="could not be sent"):
            await call
