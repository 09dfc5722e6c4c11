"""Programs that start an engine as root and then change their user, so that they cannot signal their children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from tests.kit.source import ROOT

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can change the user of a process"),
]

NOBODY = 65534
PROGRAM = """
import asyncio, json, os, sys, tempfile
from pathlib import Path

sys.path.append({root!r})
sys.executable = {interpreter!r}
from aioengine.errors import EngineDeadError
from aioengine.testing.fake_engine import fake_async_engine


def pids(engine):
    return [process["pid"] for process in engine.health()["processes"]]


async def main():
    async with fake_async_engine({{"": "x" * 1000}}, step_time_s=0.01) as engine:
        stream = engine.async_generate("a", {{"max_new_tokens": 100}}, stream=True)
        text = (await anext(stream))["text"]
        os.setgroups([])
        os.setgid({nobody})
        os.setuid({nobody})
        print(json.dumps(pids(engine)), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            text += "".join([chunk["text"] async for chunk in stream])
            outcome = len(text), engine.stats()["num_restarts"], pids(engine)
        except EngineDeadError as error:
            outcome = str(error.__cause__)
        print(json.dumps(outcome), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may write to."""
    with TemporaryDirectory(prefix="aio-") as path:
        Path(path).chmod(0o777)
        yield Path(path)


class Program:
    """A program that starts an engine and a request of 100 tokens as root, and becomes the user nobody."""

    def __init__(self, folder: Path, interpreter: str = sys.executable) -> None:
        program = PROGRAM.format(root=str(ROOT), interpreter=interpreter, nobody=NOBODY)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )
        self.children = [psutil.Process(pid) for pid in self._read()]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.communicate()

    def finish_request(self) -> list[Any]:
        """Return the length of the text, the number of restarts, and the processes, or else the cause of the error."""
        assert self.popen.stdin is not None
        print(file=self.popen.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Shut the engine down, and check that none of its processes is left."""
        assert self.popen.communicate("\n", timeout=30)[0] == ""
        assert self.popen.returncode == 0
        _, alive = psutil.wait_procs(self.children, timeout=10)
        assert alive == []

    def _read(self) -> list[Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.popen.communicate()
        return json.loads(line)


def interpreter_for_everyone() -> str:
    """A Python of this version with the packages of the engine, which the user nobody can run."""
    check = f"import sys; sys.path[:0] = {[*sys.path, str(ROOT)]!r}; import aioengine.testing.fake_engine, zmq, msgspec"
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            subprocess.run(
                [candidate, "-c", check],
                check=True,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                env={},
                stderr=subprocess.DEVNULL,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("another user cannot run a Python of this version with the engine's packages")


def test_requests_finish_and_shutdown_ends_the_processes_after_setuid(folder: Path) -> None:
    with Program(folder) as program:
        pids = [child.pid for child in program.children]
        assert program.finish_request() == [100, 0, pids]
        program.end()


@pytest.mark.parametrize("role", [0, 1])
def test_lost_process_is_replaced_as_the_new_user(role: int, folder: Path) -> None:
    with Program(folder, interpreter_for_everyone()) as program:
        program.children[role].kill()
        length, num_restarts, pids = program.finish_request()
        assert (length, num_restarts) == (100, 1)
        replacements = [psutil.Process(pid) for pid in pids]
        assert [process.uids().real for process in replacements] == [NOBODY, NOBODY]
        program.children += replacements
        program.end()


@pytest.mark.parametrize("role", [0, 1])
def test_lost_process_that_the_new_user_cannot_replace_is_an_error(role: int, folder: Path) -> None:
    interpreter = folder / "private" / "python"
    interpreter.parent.mkdir(mode=0o700)
    interpreter.symlink_to(sys.executable)
    with Program(folder, str(interpreter)) as program:
        program.children[role].kill()
        assert "Permission denied" in str(program.finish_request())
        program.end()
