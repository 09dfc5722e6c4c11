"""Control calls during the loss of the scheduler process are sent once and affect no request."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from aioengine.errors import RequestError
from aioengine.memory.prefix_cache import PrefixCache
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.fake_runner import build
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings
from tests.processes.restart_kit import ANSWERS, ask, pid_of, undisturbed, until_idle, until_restarted

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from aioengine.settings.config import Settings
    from aioengine.testing.fake_runner import FakeRunner

pytestmark = pytest.mark.process


def build_fragile(settings: Settings, report: Callable[..., None]) -> FakeRunner:
    """Build a runner whose process dies when the cache is flushed."""

    def die(_: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit

    PrefixCache.clear = die  # type: ignore[assignment, method-assign]
    return build(settings, report)


async def test_call_that_kills_the_process_fails_alone() -> None:
    settings = fake_settings(factory=f"{__name__}:build_fragile")
    async with Frontend(settings, max_restarts=1) as frontend:
        reply = await frontend.call("flush_cache")
        assert not reply.success
        assert reply.stage == "crash"
        assert "was killed by signal 9 before it answered 'flush_cache'; this call was not repeated" in reply.message
        frontend.submit(1)
        await frontend.finished(1)
        assert frontend.supervisor.num_restarts == 1
        assert frontend.failures == []


async def test_failed_control_call_does_not_pause_the_engine() -> None:
    async with fake_async_engine(ANSWERS, step_time_s=0.005) as engine:
        asking = asyncio.create_task(ask(engine, "plain", stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 3)
        pid = pid_of(engine, "scheduler")
        os.kill(pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(engine.pause_generation("in_place")), asyncio.ensure_future(engine.freeze_gc())]
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(RequestError, match="was killed by signal 9 before it answered") as caught:
                await call
            assert caught.value.stage == "crash"
        await until_restarted(engine, 1)
        assert await asking == (await undisturbed(has_answers=True))["plain"]
        assert await engine.pause_generation("in_place")
        assert await engine.continue_generation()
        await until_idle(engine)
