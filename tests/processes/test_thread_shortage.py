"""If the system allows no more threads, a start fails or is tried again, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from operator import le
from typing import TYPE_CHECKING

import psutil
import pytest

from aioengine.errors import EngineStartupError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.waiting import until, wait_until
from tests.processes.restart_kit import ANSWERS, ask_all, pid_of, undisturbed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


class Shortage:
    """Lets only ``num_left`` threads start."""

    def __init__(self, patch: pytest.MonkeyPatch, num_left: int) -> None:
        self.num_left = num_left
        self.num_refused = 0
        self._plain = threading.Thread.start
        patch.setattr(threading.Thread, "start", lambda thread: self._start(thread))

    def _start(self, thread: threading.Thread) -> None:
        if self.num_left <= 0:
            self.num_refused += 1
            raise RuntimeError("can't start new thread")
        self.num_left -= 1
        self._plain(thread)


def held() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and children of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(psutil.Process().children())


@pytest.mark.parametrize("face", ["asynchronous", "synchronous"])
def test_start_with_too_few_threads_is_an_error_and_leaves_nothing(
    face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def run() -> None:
        async with fake_async_engine(processes=True) as engine:
            await engine.async_generate("a", {"max_new_tokens": 2})

    def start() -> None:
        if face == "asynchronous":
            asyncio.run(run())
        else:
            with fake_engine(processes=True) as llm:
                llm.generate("a", {"max_new_tokens": 2})

    with monkeypatch.context() as patch:
        enough = Shortage(patch, 100)
        start()
    num_needed = 100 - enough.num_left
    before, num_threads = held(), 0
    while True:
        with monkeypatch.context() as patch:
            Shortage(patch, num_threads)
            if num_threads == num_needed:
                start()
                break
            with pytest.raises(EngineStartupError, match="needs another thread"):
                start()
        # Threads of the first engine may end after ``before`` was counted.
        assert wait_until(lambda: all(map(le, held(), before))), (num_threads, before, held())
        assert list(tmp_path.iterdir()) == []
        num_threads += 1
    assert num_needed >= 5


@pytest.mark.parametrize(
    ("role", "num_left"),
    [
        ("scheduler", 0),
        ("scheduler", 2),
        ("detokenizer", 1),
        pytest.param("scheduler", 1, marks=pytest.mark.slow),
        pytest.param("detokenizer", 0, marks=pytest.mark.slow),
        pytest.param("detokenizer", 2, marks=pytest.mark.slow),
    ],
)
async def test_children_are_replaced_once_there_are_threads_again(
    role: str, num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await undisturbed(has_answers=True)
    async with fake_async_engine(ANSWERS, step_time_s=0.003) as engine:
        asking = asyncio.create_task(ask_all(engine, stream=True))
        await until(lambda: engine.stats()["output_tokens"] > 20)
        with monkeypatch.context() as patch:
            shortage = Shortage(patch, num_left)
            os.kill(pid_of(engine, role), signal.SIGKILL)
            if role == "scheduler":
                await until(lambda: shortage.num_refused)
        async with asyncio.timeout(60):
            assert await asking == expected


async def test_requests_need_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_async_engine(ANSWERS, processes=True) as engine:
        shortage = Shortage(monkeypatch, 0)
        assert await ask_all(engine, stream=False) == await undisturbed(has_answers=True)
        await engine.flush_cache()
        assert await engine.drain(5)
        assert shortage.num_refused == 0
