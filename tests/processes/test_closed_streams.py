"""An engine works in processes with closed standard streams, such as daemons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]

SYNC = """
import json, os, pathlib, sys
from aioengine.testing.fake_engine import fake_engine

with fake_engine({"": "Paris."}, processes=True) as engine:
    text = engine.generate("x")["text"]
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in engine.get_all_child_pids() for fd in (0, 1, 2)]
pathlib.Path(sys.argv[1]).write_text(json.dumps([text, links]))
"""

ASYNC = """
import asyncio, json, os, pathlib, sys
from aioengine.testing.fake_engine import fake_async_engine

async def main():
    async with fake_async_engine({"": "Paris."}, processes=True) as engine:
        text = (await engine.async_generate("x"))["text"]
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in engine.get_all_child_pids() for fd in (0, 1, 2)]
    pathlib.Path(sys.argv[1]).write_text(json.dumps([text, links]))

asyncio.run(main())
"""

COMMAND_LINE = """
import sys
from aioengine import cli
from aioengine.cli import commands
from aioengine.testing.fake_engine import fake_engine

class Faked:
    @staticmethod
    def from_config(config):
        return fake_engine({"": " Paris."})

commands.Engine = Faked
sys.exit(cli.main(sys.argv[1:]))
"""


def run(closed: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run Python with some of its standard streams closed."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-W", "error", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(
    ("program", "closed"),
    [
        *(pytest.param(SYNC, closed, marks=pytest.mark.slow) for closed in CLOSED[:-1]),
        (SYNC, CLOSED[-1]),
        (ASYNC, CLOSED[-1]),
    ],
)
def test_an_engine_works_and_its_children_have_streams_of_their_own(program: str, closed: str, tmp_path: Path) -> None:
    written = tmp_path / "written"
    done = run(closed, "-c", program, str(written))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text, links = json.loads(written.read_text())
    assert text == "Paris."
    assert len(links) == 6
    assert [link for link in links if link.startswith("socket:")] == []


@pytest.mark.parametrize(
    ("closed", "argv", "status", "out", "error"),
    [
        ("<&-", ["The capital of France is", "--max-new-tokens", "9"], 0, " Paris.\n", ""),
        ("2>&-", ["The capital of France is", "--max-new-tokens", "9"], 0, " Paris.\n", ""),
        ("2>&-", ["x", "--temperature", "9"], 2, "", ""),
        ("<&-", [], 2, "", 'aioengine: give a prompt: aioengine generate "Once upon a time"\n'),
        (">&-", ["x"], 1, "", "aioengine: standard output is closed: answers cannot be printed\n"),
        (">&- 2>&-", ["x"], 1, "", ""),
    ],
)
def test_command_line_works_or_prints_the_reason(
    closed: str, argv: list[str], status: int, out: str, error: str
) -> None:
    done = run(closed, "-c", COMMAND_LINE, "generate", *argv)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, error)


def test_chat_without_input_ends() -> None:
    done = run("<&-", "-c", COMMAND_LINE, "chat")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
