"""Stalled processes are reported as errors. Slow and idle processes are not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from aioengine.errors import EngineStalledError
from aioengine.processes.scheduler_process import SchedulerService
from aioengine.protocol.messages import Role
from aioengine.supervision import incarnation
from aioengine.supervision.incarnation import NUM_TICKS, Heartbeats
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import ECHO, FakeRunner, build
from aioengine.testing.faults import Faults
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings
from tests.processes.restart_kit import frontend_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.settings.config import Settings

process = pytest.mark.process

STALL_S = 1.5


@process
async def test_step_that_does_not_end_ends_all_calls() -> None:
    faults = Faults(stall_at=4, stall_s=60.0)
    async with fake_async_engine({"": "never finished"}, faults=faults, stall_timeout_s=2.0, max_restarts=0) as engine:
        whole = engine.async_generate("one", {"max_new_tokens": 32})
        stream = engine.async_generate("two", {"max_new_tokens": 32}, stream=True)
        with pytest.raises(EngineStalledError, match=r"scheduler process is alive.*stall_timeout"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStalledError):
            await whole
        with pytest.raises(EngineStalledError):
            await engine.async_generate("later")
        assert engine.health()["state"] == "stalled"
        assert not engine.is_alive
        assert isinstance(await engine.wait_failed(), EngineStalledError)


@process
async def test_deadline_of_the_queue_passes_also_during_a_long_step() -> None:
    step_s = 2.5
    async with fake_async_engine({"": "x"}, step_time_s=step_s, max_running=1) as engine:
        params = {"max_new_tokens": 1}
        computed = asyncio.ensure_future(engine.async_generate("one", params, queue_timeout=0.5))
        await until(lambda: frontend_of(engine).parts.processes.uids_in_flight())
        waiting = await engine.async_generate("two", params, queue_timeout=0.3)
        assert waiting["meta_info"]["finish_reason"] == {"type": "deadline", "which": "queue"}
        assert not computed.done()
        assert (await computed)["meta_info"]["finish_reason"] == "length"


@process
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_process_that_is_stopped_is_an_error(role: str) -> None:
    async with Frontend(fake_settings(step_time_s=0.01), stall_timeout_s=STALL_S) as frontend:
        frontend.submit(1, num_tokens=3000)
        await until(lambda: frontend.token_ids(1))
        pid = next(state.pid for state in frontend.supervisor.process_states() if state.role == role)
        os.kill(pid, signal.SIGSTOP)
        error = await frontend.failure(10.0)
    assert isinstance(error, EngineStalledError)
    assert f"the {role} process" in str(error)


@process
async def test_idle_paused_and_slow_schedulers_are_not_stalled() -> None:
    settings = fake_settings(step_time_s=0.002, stall_at=3, stall_s=0.8)
    async with Frontend(settings, stall_timeout_s=STALL_S) as frontend:
        await asyncio.sleep(1.1 * STALL_S)
        frontend.submit(1, num_tokens=300)
        await asyncio.sleep(0.5)
        assert (await frontend.call("pause")).success
        await asyncio.sleep(1.1 * STALL_S)
        assert (await frontend.call("continue", call_id=2)).success
        await frontend.finished(1)
        assert frontend.failures == []


A, B = Role("a"), Role("b")


class Watch:
    """Heartbeats with their reported errors."""

    def __init__(self, stall_timeout_s: float, roles: Sequence[Role]) -> None:
        self.errors: list[EngineStalledError] = []
        self.heartbeats = Heartbeats(stall_timeout_s)
        self.heartbeats.watch(roles, lambda role, error: self.errors.append(error))


async def test_stall_is_reported_once_and_heartbeats_prevent_it() -> None:
    watch = Watch(0.08, [A, B])
    for _ in range(20):
        await asyncio.sleep(0.01)
        watch.heartbeats.record(A, time.monotonic())
        watch.heartbeats.record(B, time.monotonic())
    assert watch.errors == []
    await until(lambda: watch.errors)
    [error] = watch.errors
    assert "the a process" in str(error)
    await asyncio.sleep(0.2)
    assert len(watch.errors) == 1


async def test_program_that_was_stopped_reports_no_stall() -> None:
    watch = Watch(0.08, [A])
    time.sleep(0.2)  # noqa: ASYNC251  # the whole program, as when its terminal stops it
    await asyncio.sleep(0.02)
    assert watch.errors == []
    watch.heartbeats.stop()


async def test_nothing_is_reported_after_stop() -> None:
    watch = Watch(0.01 * NUM_TICKS, [A])
    watch.heartbeats.stop()
    await asyncio.sleep(0.03 * NUM_TICKS)
    assert watch.errors == []


def build_slow_to_answer(settings: Settings, report: Callable[..., None]) -> FakeRunner:
    """Build a fake runner in a process with slow control calls."""

    def slowly(plain: Callable[..., object]) -> Callable[..., object]:
        def answer(*arguments: object) -> object:
            time.sleep(1.5 * STALL_S)
            return plain(*arguments)

        return answer

    for owner, name in (
        (SchedulerService, "_server_info"),
        (SchedulerService, "_flush_cache"),
        (FakeRunner, "_echo"),
    ):
        setattr(owner, name, slowly(getattr(owner, name)))
    return build(settings, report)


@process
async def test_long_control_call_is_no_stall() -> None:
    settings = fake_settings(factory=f"{__name__}:build_slow_to_answer")
    async with Frontend(settings, stall_timeout_s=STALL_S) as frontend:
        for name in ("server_info", "flush_cache", ECHO):
            reply = await frontend.call(name)
            assert (name, reply.success, frontend.failures) == (name, True, [])
        os.kill(frontend.supervisor.process_states()[0].pid, signal.SIGSTOP)  # the next silence is a stall
        assert isinstance(await frontend.failure(10.0), EngineStalledError)


async def test_long_work_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "MAX_WORK_S", 0.2)
    beats, stalled, scheduler = Heartbeats(0.1), list[float](), Role("scheduler")
    begun_at = time.monotonic()
    beats.watch([scheduler], lambda *_: stalled.append(time.monotonic() - begun_at))
    beats.excuse(scheduler)
    await until(lambda: stalled)
    assert stalled[0] > 0.25
