"""A lost detokenizer is replaced alone: the scheduler process keeps its weights and its cache."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioengine.protocol.messages import NewEpoch
from aioengine.supervision.incarnation import Incarnation
from aioengine.supervision.launchers.process import ProcessLauncher
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import FakeRunner, build
from aioengine.testing.faults import Faults
from aioengine.transport.zmq import ZmqSender
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings
from tests.processes.restart_kit import ANSWERS, ask, ask_all, pid_of, undisturbed, until_idle, until_restarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.protocol.messages import Message
    from aioengine.settings.config import Settings
    from aioengine.supervision.launchers._base import RunningChild

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
async def test_scheduler_continues_after_a_lost_detokenizer(number: signal.Signals) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.003, stall_timeout_s=2.0) as engine:
        scheduler = pid_of(engine, "scheduler")
        for num_restarts in (1, 2):
            before = engine.stats()
            asking = asyncio.create_task(ask_all(engine, stream=True))
            await until(lambda earlier=before: engine.stats()["output_tokens"] > earlier["output_tokens"] + 50)  # type: ignore[misc]
            detokenizer = pid_of(engine, "detokenizer")
            os.kill(detokenizer, number)
            assert await asking == expected
            await until_restarted(engine, num_restarts)
            assert pid_of(engine, "scheduler") == scheduler
            assert pid_of(engine, "detokenizer") != detokenizer
            await until_idle(engine)
            stats = engine.stats()
            assert all(stats[name] >= before[name] for name in ("num_steps", "output_tokens", "num_finished"))
        assert len(engine.get_all_child_pids()) == 2


@pytest.mark.parametrize("has_descriptors", [True, False])
async def test_exit_of_a_detokenizer_is_reported_once(has_descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second report would count as the exit of the new detokenizer, and the scheduler would be replaced too."""
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    reported: list[RunningChild] = []
    plain = Incarnation._child_ended
    monkeypatch.setattr(Incarnation, "_child_ended", lambda own, child: (reported.append(child), plain(own, child))[1])
    async with Frontend(fake_settings(step_time_s=0.002), max_restarts=2) as frontend:
        scheduler = frontend.supervisor.process_states()[0].pid
        for num_restarts in (1, 2):
            frontend.submit(num_restarts, num_tokens=50)
            os.kill(frontend.supervisor.process_states()[1].pid, signal.SIGKILL)
            await frontend.finished(num_restarts)
            assert frontend.supervisor.num_restarts == num_restarts
            assert frontend.supervisor.process_states()[0].pid == scheduler
            assert len(reported) == num_restarts


def build_and_count(settings: Settings, report: Callable[..., None]) -> FakeRunner:
    """Build a runner, and write a mark to a file."""
    with Path(os.environ["MARKS"]).open("a") as marks:
        marks.write(".")
    return build(settings, report)


async def test_weights_are_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    monkeypatch.setenv("MARKS", str(marks))
    async with Frontend(fake_settings(factory=f"{__name__}:build_and_count"), max_restarts=1) as frontend:
        os.kill(frontend.supervisor.process_states()[1].pid, signal.SIGKILL)
        frontend.submit(1, num_tokens=50)
        await frontend.finished(1)
        assert frontend.supervisor.num_restarts == 1
    assert marks.read_text() == "."


async def test_paused_engine_stays_paused_and_control_calls_are_answered() -> None:
    async with fake_async_engine(ANSWERS, step_time_s=0.005) as engine:
        asking = asyncio.create_task(ask(engine, "plain", stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 3)
        assert await engine.pause_generation("in_place")
        later = asyncio.create_task(ask(engine, "plain", stream=True))
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        info = asyncio.create_task(engine.get_server_info())
        await until_restarted(engine, 1)
        assert (await info)["status"] == "ready"
        num_steps = (await engine.get_server_info())["internal_states"][0]["num_steps"]  # type: ignore[index]
        await asyncio.sleep(0.1)
        assert (await engine.get_server_info())["internal_states"][0]["num_steps"] == num_steps  # type: ignore[index]
        assert not later.done()
        assert await engine.continue_generation()
        assert await asking == await later == (await undisturbed(has_answers=True))["plain"]


@pytest.mark.parametrize(
    ("owner", "stage", "max_losses"),
    [(Incarnation, "_begin_epoch", 1), (ProcessLauncher, "launch_detokenizer", 2)],
)
async def test_scheduler_that_dies_during_a_mend_is_replaced(
    owner: type[Incarnation | ProcessLauncher], stage: str, max_losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it dies before its ``Ready``, both processes were lost at the same time."""
    plain = getattr(owner, stage)

    async def kill_scheduler(own: Incarnation | ProcessLauncher) -> None:
        launcher = own if isinstance(own, ProcessLauncher) else own._launcher
        os.kill(launcher.children[0].pid, signal.SIGKILL)
        await plain(own)

    monkeypatch.setattr(owner, stage, kill_scheduler)
    async with fake_async_engine(ANSWERS, step_time_s=0.003, max_restarts=max_losses) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 50)
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        assert await asking == await undisturbed(has_answers=True)
        assert engine.stats()["num_restarts"] <= max_losses
        await until_idle(engine)


async def test_detokenizer_that_cannot_start_is_replaced_with_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ProcessLauncher.launch_detokenizer

    async def launch(own: ProcessLauncher) -> None:
        await plain(own)
        own.children[-1].kill()

    monkeypatch.setattr(ProcessLauncher, "launch_detokenizer", launch)
    async with fake_async_engine(ANSWERS, step_time_s=0.003, max_restarts=1) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 50)
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        assert await asking == await undisturbed(has_answers=True)
        await until_restarted(engine, 1)


async def test_stalled_scheduler_is_replaced_with_the_detokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioengine.supervision.incarnation.MEND_TIMEOUT_S", 1.0)
    faults = Faults(stall_at=9, stall_s=100.0, once=str(tmp_path / "once"))
    async with fake_async_engine(ANSWERS, faults=faults) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until((tmp_path / "once").exists)
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        async with asyncio.timeout(40):
            assert await asking == await undisturbed(has_answers=True)
        assert engine.stats()["num_restarts"] == 1


async def test_messages_during_a_change_of_epoch_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive, and a heartbeat is answered, just before and after the message of the change."""
    frontend = Frontend(fake_settings(step_time_s=0.002), max_restarts=1)
    plain = ZmqSender.send

    def send(own: ZmqSender, messages: list[Message]) -> None:
        is_change = any(isinstance(message, NewEpoch) for message in messages)
        if is_change:
            frontend.submit(2)
            frontend.supervisor._incarnation.send([])
        plain(own, messages)
        if is_change:
            frontend.submit(3)
            frontend.supervisor._incarnation.send([])

    monkeypatch.setattr(ZmqSender, "send", send)
    async with frontend:
        scheduler, detokenizer = frontend.supervisor.process_states()
        frontend.submit(1, num_tokens=200)
        os.kill(detokenizer.pid, signal.SIGKILL)
        for uid in (1, 2, 3):
            await frontend.finished(uid)
        assert [len(frontend.token_ids(uid)) for uid in (1, 2, 3)] == [200, 8, 8]
        assert frontend.supervisor.process_states()[0].pid == scheduler.pid
        assert frontend.supervisor.num_restarts == 1


def remove_files(place: Path, *, only_sockets: bool) -> None:
    for path in place.glob("aioengine-*/*"):
        if path.is_socket() or not only_sockets:
            path.unlink()


@pytest.mark.parametrize("what", ["sockets", "everything"])
async def test_requests_continue_after_the_engine_files_are_removed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The children cannot connect to each other without socket files, so both are replaced."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.003) as engine:
        scheduler = pid_of(engine, "scheduler")
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 50)
        remove_files(tmp_path, only_sockets=what == "sockets")
        os.kill(pid_of(engine, "detokenizer"), signal.SIGKILL)
        async with asyncio.timeout(40):
            assert await asking == expected
        await until_restarted(engine, 1)
        assert pid_of(engine, "scheduler") != scheduler
        await until_idle(engine)
