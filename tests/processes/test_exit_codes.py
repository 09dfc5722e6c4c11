"""Exit codes of children in programs that ignore SIGCHLD or reap all children."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

from aioengine.errors import EngineStartupError
from tests.kit.source import ROOT
from tests.processes.engine_kit import Frontend, fake_settings

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, json, os, signal, sys, time

def reap_all(number, frame):
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass

setup, has_pidfd, *scenes = sys.argv[1:]
if setup == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
elif setup == "reaped by the program":
    signal.signal(signal.SIGCHLD, reap_all)
if has_pidfd == "False":
    del os.pidfd_open

import logging
from aioengine.errors import EngineDeadError, EngineStartupError
from tests.kit.waiting import until
from tests.processes.engine_kit import Frontend, fake_settings

logging.getLogger("aioengine").setLevel(logging.CRITICAL)  # lost processes are not reported on stderr

def describe(error):
    return {"type": type(error).__name__, "exit_code": getattr(error, "exit_code", None), "text": str(error)}

async def killed():
    async with Frontend(fake_settings(step_time_s=0.02)) as frontend:
        frontend.submit(1, num_tokens=1000)
        scheduler = frontend.supervisor.process_states()[0]
        os.kill(scheduler.pid, signal.SIGKILL)
        error = await frontend.failure()
        assert not frontend.supervisor.process_states()[0].alive
    return describe(error)

async def replaced():
    async with Frontend(fake_settings(step_time_s=0.01), max_restarts=2) as frontend:
        frontend.submit(1, num_tokens=60)
        for place in (0, 1):
            os.kill(frontend.supervisor.process_states()[place].pid, signal.SIGKILL)
            await until(lambda: frontend.supervisor.num_restarts > place and not frontend.supervisor.is_recovering)
        await frontend.finished(1)
        pids = [state.pid for state in frontend.supervisor.process_states() if state.alive]
    return {"alive": len(pids), "restarts": frontend.supervisor.num_restarts, "left": [p for p in pids if exists(p)]}

def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

async def dies_at_the_start():
    try:
        await Frontend(fake_settings(factory="tests.processes.test_exit_codes:vanish")).supervisor.start()
    except EngineStartupError as error:
        return describe(error)

async def killed_without_a_loop():
    frontend = Frontend()
    await frontend.supervisor.start()
    frontend.supervisor.kill_now()
    states = frontend.supervisor.process_states()
    return {"alive": [state.alive for state in states], "left": [one.pid for one in states if exists(one.pid)]}

print(json.dumps({scene: asyncio.run(globals()[scene]()) for scene in scenes}))
"""
SCENES = ("killed", "dies_at_the_start", "replaced", "killed_without_a_loop")


def vanish(*_: object) -> None:
    """A factory that ends its process."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def ask(*_: object) -> None:
    """A factory that reads from standard input."""
    input("Do you trust this code? ")


def give_up(*_: object) -> None:
    """A factory that ends the program, like a library that misses a dependency."""
    sys.exit("this model needs the package flash")


@cache
def run(setup: str, has_pidfd: bool, *scenes: str) -> dict[str, dict[str, object]]:
    """Run scenes one after the other in one program, and return their results."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, setup, str(has_pidfd), *scenes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    results: dict[str, dict[str, object]] = json.loads(done.stdout)
    return results


def check(setup: str, text: str) -> None:
    """Check the exit code. It may be known, if the engine reaped the child before the program did."""
    unknown = "ended with an unknown exit code (this program ignores SIGCHLD or waits for its children by itself)"
    assert unknown in text or (setup != "ignored" and "was killed by signal 9" in text)


@pytest.mark.parametrize(
    ("setup", "has_pidfd"),
    [
        ("ignored", True),
        ("reaped by the program", False),
        pytest.param("ignored", False, marks=pytest.mark.slow),
        pytest.param("reaped by the program", True, marks=pytest.mark.slow),
    ],
)
class TestAnUnknownExitCode:
    def test_of_a_killed_process_is_not_taken_for_0(self, setup: str, has_pidfd: bool) -> None:
        result = run(setup, has_pidfd, *SCENES)["killed"]
        assert result["type"] == "EngineDeadError"
        check(setup, str(result["text"]))
        assert result["exit_code"] in {"ignored": [None], "reaped by the program": [None, -9]}[setup]

    def test_of_a_process_that_dies_at_the_start(self, setup: str, has_pidfd: bool) -> None:
        result = run(setup, has_pidfd, *SCENES)["dies_at_the_start"]
        assert result["type"] == "EngineStartupError"
        check(setup, str(result["text"]))

    def test_does_not_prevent_replacement_and_a_complete_end(self, setup: str, has_pidfd: bool) -> None:
        assert run(setup, has_pidfd, *SCENES)["replaced"] == {"alive": 2, "restarts": 2, "left": []}

    def test_does_not_prevent_the_end_without_a_loop(self, setup: str, has_pidfd: bool) -> None:
        assert run(setup, has_pidfd, *SCENES)["killed_without_a_loop"] == {"alive": [False, False], "left": []}


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_known_exit_code_is_reported(has_pidfd: bool) -> None:
    result = run("default", has_pidfd, "killed")["killed"]
    assert (result["type"], result["exit_code"]) == ("EngineDeadError", -9)
    assert "was killed by signal 9" in str(result["text"])


@pytest.mark.parametrize(("factory", "message"), [(ask, "EOFError: EOF when"), (give_up, "SystemExit: this model nee")])
async def test_code_that_reads_input_or_exits_fails_the_start(factory: Callable[..., None], message: str) -> None:
    """Standard input is empty, because a question could never be answered."""
    frontend = Frontend(fake_settings(factory=f"{__name__}:{factory.__name__}"), startup_timeout_s=20.0)
    with pytest.raises(EngineStartupError, match=message):
        await frontend.supervisor.start()
