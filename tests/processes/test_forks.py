"""An AsyncEngine with processes that is created once, and started in forks or several times."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.source import ROOT

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from aioengine.testing.fake_engine import fake_async_engine

engine = fake_async_engine({{"": "Paris."}}, processes=True)

async def ask():
    async with engine:
        answer = await engine.async_generate("a")
        assert answer["text"] == "Paris.", answer
        return engine.get_all_child_pids()

def work():
    workers = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                asyncio.run(ask())
                code = 0
            finally:
                os._exit(code)
        workers.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in workers] == [0, 0]

work()
first, second = asyncio.run(ask()), asyncio.run(ask())
assert not set(first) & set(second)
work()  # after a shutdown the forks may start it too
print("done")
"""


def test_engine_can_be_started_in_forks() -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


FORKS_WHILE_IT_STARTS = """
import multiprocessing, os, signal, subprocess, sys, threading, time
sys.path.insert(0, {root!r})
from aioengine.testing.fake_engine import fake_engine

start_process = subprocess._fork_exec
is_starting = threading.Event()

def slowly(*arguments):
    is_starting.set()
    time.sleep(0.3)  # other threads run, as they may between any two lines of Popen
    return start_process(*arguments)

def fork():
    while is_starting.wait():
        is_starting.clear()
        worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        worker.start()
        workers.append(worker)

subprocess._fork_exec = slowly
workers = []
threading.Thread(target=fork, daemon=True).start()
with fake_engine({{"": "Paris."}}, processes=True) as engine:
    os.kill(engine.get_all_child_pids()[0], signal.SIGKILL)
    assert engine.generate("a")["text"] == "Paris."
assert workers and all(worker.is_alive() for worker in workers), workers
print("done")
"""


def test_engine_starts_while_the_program_forks_workers() -> None:
    """A worker that is forked while a process starts would block ``Popen`` until the worker exits."""
    command = [sys.executable, "-c", FORKS_WHILE_IT_STARTS.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "done\n", done.stderr


async def test_engine_of_the_parent_is_closed_in_a_fork() -> None:
    async with fake_async_engine({"": "Paris."}) as engine:
        pid = os.fork()
        if not pid:
            os._exit(0 if (engine.health()["state"], engine.is_alive) == ("closed", False) else 1)
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
        assert engine.health()["state"] == "running"
