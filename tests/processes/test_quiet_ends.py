"""Engines and programs end quickly, print nothing and leave nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from aioengine.errors import EngineClosedError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.source import ROOT
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.process

NUM_CYCLES = 3

HEAD = """
import asyncio, os, sys, threading, time
from aioengine.errors import EngineClosedError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from aioengine.testing.faults import Faults

LONG = {"max_new_tokens": 1500}
SETUP = {"processes": True, "step_time_s": 0.002}


async def busy(engine):
    streams = [engine.async_generate(str(number), LONG, stream=True) for number in range(5)]
    await anext(streams[0])
    print(*engine.get_all_child_pids(), flush=True)
    return streams
"""

ENDS = {
    "shut down while it works": """
async def main():
    async with fake_async_engine(**SETUP) as engine:
        streams = await busy(engine)
asyncio.run(main())
""",
    "never shut down": """
async def main():
    global engine, streams
    engine = fake_async_engine(**SETUP)
    await engine.start()
    streams = await busy(engine)
import warnings
warnings.simplefilter("ignore", ResourceWarning)
asyncio.run(main())
""",
    "sys.exit in the middle": """
async def main():
    async with fake_async_engine(**SETUP) as engine:
        streams = await busy(engine)
        sys.exit(0)
asyncio.run(main())
""",
    "an exception in the middle": """
async def main():
    async with fake_async_engine(**SETUP) as engine:
        streams = await busy(engine)
        raise ZeroDivisionError
try:
    asyncio.run(main())
except ZeroDivisionError:
    pass
""",
    "two runs of one synchronous engine": """
with fake_engine(**SETUP) as llm:
    print(*llm.get_all_child_pids(), flush=True)
    asyncio.run(asyncio.wait_for(llm.async_generate("a", {"max_new_tokens": 5}), 20))
    asyncio.run(asyncio.wait_for(llm.async_generate("a", {"max_new_tokens": 5}), 20))
""",
    "a synchronous stream that is left": """
llm = fake_engine(**SETUP)
print(*llm.get_all_child_pids(), flush=True)
for chunk in llm.generate("a", LONG, stream=True):
    break
llm.shutdown()
""",
    "a thread that still reads": """
llm = fake_engine(**SETUP)
print(*llm.get_all_child_pids(), flush=True)
def read():
    try:
        llm.generate("a", LONG)
    except RuntimeError:
        pass
threading.Thread(target=read).start()
time.sleep(0.05)
llm.shutdown()
""",
    "drained": """
async def main():
    async with fake_async_engine(**SETUP) as engine:
        streams = await busy(engine)
        assert not await engine.drain(0.05)
asyncio.run(main())
""",
}


def gone(pids: list[int]) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def program(text: str, place: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(place)}
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", HEAD + text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)


SLOW_ENDS = ("shut down while it works", "an exception in the middle")
"""As "sys.exit in the middle", they leave ``async with`` while streams are open."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_ENDS else ()) for name in ENDS]
)
def test_program_ends_silently_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """In Python's development mode, with warnings as errors."""
    running = program(ENDS[name], tmp_path)
    out, err = running.communicate(timeout=90)
    # On a busy machine, asyncio's debug mode reports slow callbacks.
    told = [line for line in err.splitlines() if not line.startswith("Executing <")]
    assert (running.returncode, told) == (0, [])
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert gone(pids)
    assert list(tmp_path.iterdir()) == []


STARTS = {
    "asynchronous": """
async def main():
    engine = fake_async_engine(faults=Faults(start_s=1000.0))
    async with engine:
        pass
print("starting", flush=True)
asyncio.run(main())
""",
    "synchronous": """
print("starting", flush=True)
fake_engine(faults=Faults(start_s=1000.0))
""",
}


@pytest.mark.parametrize(
    ("name", "after_s"),
    [
        ("asynchronous", 0.02),
        ("asynchronous", 1.5),
        ("synchronous", 0.5),
        pytest.param("asynchronous", 0.5, marks=pytest.mark.slow),
        pytest.param("synchronous", 0.02, marks=pytest.mark.slow),
        pytest.param("synchronous", 1.5, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_it_starts_ends_it_soon(name: str, after_s: float, tmp_path: Path) -> None:
    """The only traceback is that of KeyboardInterrupt."""
    running = program(STARTS[name], tmp_path)
    assert running.stdout is not None
    assert running.stdout.readline() == "starting\n"
    time.sleep(after_s)
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=90)
    assert running.returncode == -signal.SIGINT
    # See above: slow callbacks on a busy machine.
    told = [line for line in err.splitlines() if not line.startswith("Executing <")]
    assert told[-1] == "KeyboardInterrupt"
    assert re.search(r"Engine\w*Error|Warning|never retrieved|was destroyed", err) is None
    assert gone([child.pid for child in children])
    assert list(tmp_path.iterdir()) == []


class Holdings:
    """Resources of the system that this process holds."""

    def __init__(self) -> None:
        this = psutil.Process()
        self.fds = sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.num_system_threads = this.num_threads()
        self.children = [child.pid for child in this.children(recursive=True)]
        self.shared_memory = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]

    def counts(self) -> dict[str, int]:
        return {
            "fds": len(self.fds),
            "threads": len(self.threads),
            "system threads": self.num_system_threads,
            "children": len(self.children),
            "shared memory": len(self.shared_memory),
        }

    def now_no_more(self) -> bool:
        """Return whether this process holds no additional resource."""
        now = Holdings().counts()
        return all(now[kind] <= count for kind, count in self.counts().items())


def is_open(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_starts_and_stops_leak_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    async def cycle(number: int) -> None:
        async with fake_async_engine(processes=True) as engine:
            stream = engine.async_generate("a", {"max_new_tokens": 200}, stream=True)
            await anext(stream)
            if number % 2:
                await stream.aclose()

    def run(number: int) -> None:
        if number % 3:
            asyncio.run(cycle(number))
        else:
            with fake_engine(processes=True) as llm:
                llm.generate("a", {"max_new_tokens": 5})

    for number in range(2):  # both kinds of engine
        run(number)
    before = Holdings()
    for number in range(NUM_CYCLES):
        run(number)
    # Threads end a moment after the shutdown.
    assert wait_until(before.now_no_more), (vars(before), vars(Holdings()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", ["paused", "both stopped", "one killed", "draining", "suspended"])
async def test_shutdown_time_is_bounded_in_every_state(state: str) -> None:
    setup = {"slow_reader": "pause", "slow_reader_timeout_s": 0.05} if state == "suspended" else {}
    async with fake_async_engine(processes=True, step_time_s=0.002, **setup) as engine:
        stream = engine.async_generate("a", {"max_new_tokens": 1500}, stream=True)
        await anext(stream)
        pids = engine.get_all_child_pids()
        if state == "paused":
            await engine.pause_generation("in_place")
        elif state == "both stopped":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        elif state == "one killed":
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: engine.health()["state"] == "recovering")
        elif state == "draining":
            draining = asyncio.create_task(engine.drain(30))
            await until(lambda: engine.health()["state"] == "draining")
        else:
            await until(lambda: engine.stats()["num_waiting"] == 1 and engine.stats()["num_running"] == 0)
        pids += engine.get_all_child_pids()
        async with asyncio.timeout(40):
            await engine.shutdown()
            with pytest.raises(EngineClosedError):
                async for _ in stream:
                    pass
            if state == "draining":
                assert not await draining
        assert gone(pids)
