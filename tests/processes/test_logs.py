"""Logs as programs see them: with logging of their own, and without."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process

ANSWER = """
import logging, os, signal, sys
from aioengine import Engine
SETUP
with Engine(ARGUMENTS) as engine:
    LATER
    engine.generate("x", {"max_new_tokens": 1})
"""
KILL = """
import os, signal, sys
from aioengine.testing.fake_engine import fake_engine

with fake_engine(processes=True, max_restarts=int(sys.argv[1])) as engine:
    os.kill(engine.get_all_child_pids()[0], signal.SIGKILL)
    try:
        engine.generate("x", {"max_new_tokens": 4})
    except RuntimeError as error:
        print(type(error).__name__)
"""
START = [
    "model: .*/aioengine/demo, (9|17) MB of weights",
    r"device: cpu, (1 thread|\d\d+ threads|[2-9] threads)",
    "dtype: (bfloat16|float32), attention: fused",
    r"KV pool: \d+ tokens in \d+ pages, \d+ MB",
    "CUDA graphs: none",
    r"ready after \d+\.\d s",
]


def stderr_of(program: str, *argv: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done
    return done.stderr.splitlines()


def start(arguments: str, *, setup: str = "", later: str = "pass") -> list[str]:
    program = ANSWER.replace("ARGUMENTS", arguments).replace("SETUP", setup).replace("LATER", later)
    return stderr_of(program)


def test_an_unconfigured_program_is_quiet() -> None:
    assert start('device="cpu"') == []


def test_info_shows_what_an_engine_runs_on_in_an_unconfigured_program() -> None:
    lines = start('device="cpu", log_level="info"')
    assert len(lines) == len(START), lines
    for line, pattern in zip(lines, START, strict=True):
        assert re.fullmatch(r"INFO aioengine\S*: " + pattern, line)


@pytest.mark.parametrize("place", ["setup", "later"])
def test_logging_of_the_program_gets_every_record_once(place: str) -> None:
    configure = 'logging.basicConfig(format="own %(message)s")'
    kill = "os.kill(engine.get_all_child_pids()[0], signal.SIGKILL)"
    setup, later = (configure, kill) if place == "setup" else ("", f"{configure}; {kill}")
    lines = [line for line in start('device="cpu", log_level="info"', setup=setup, later=later) if "own" in line]
    found = [line for line in lines if "killed by signal 9" in line or "are replaced" in line]
    assert len(found) == 2
    assert len(lines) == (2 if place == "later" else 2 + len(START))


def test_a_level_that_the_program_has_set_is_kept() -> None:
    setup = 'logging.basicConfig(); logging.getLogger("aioengine").setLevel(logging.WARNING)'
    assert start('device="cpu", log_level="info"', setup=setup) == []


def test_an_unconfigured_program_sees_that_a_process_was_replaced() -> None:
    (line,) = stderr_of(KILL, "3")
    assert re.fullmatch(
        r"the scheduler process \(pid \d+\) was killed by signal 9; new processes continue (1 request|0 requests)", line
    )


def test_an_unconfigured_program_sees_that_an_engine_has_ended() -> None:
    (line,) = stderr_of(KILL, "0")
    assert re.fullmatch(r"the engine has ended: the scheduler process \(pid \d+\) was killed by signal 9", line)
