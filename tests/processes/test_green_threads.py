"""A start in a program with replaced threads raises an error that names the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process

# replaces threads like ``gevent.monkey.patch_all`` and ``eventlet.monkey_patch``
LIBRARY = """
import _thread, threading

def start_new_thread(function, args=(), kwargs={{}}):
    pass  # a green thread, which runs when this one waits: never

def {function}():
    _thread.start_new_thread = threading._start_new_thread = start_new_thread
"""
PROGRAM = """
from {library} import {function}
{function}()
import asyncio
from aioengine.errors import EngineStartupError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine

async def start_async():
    async with fake_async_engine({{"": "Paris."}}) as engine:
        return (await engine.async_generate("x"))["text"]

def start_sync():
    with fake_engine({{"": "Paris."}}) as engine:
        return engine.generate("x")["text"]

for start in (start_sync, lambda: asyncio.run(start_async())):
    try:
        print(start())
    except EngineStartupError as error:
        print(error)
"""


@pytest.mark.parametrize(("library", "function"), [("gevent.monkey", "patch_all"), ("eventlet", "monkey_patch")])
def test_start_names_the_library(library: str, function: str, tmp_path: Path) -> None:
    folder = tmp_path / library.partition(".")[0]
    folder.mkdir()
    for name in ("__init__.py", "monkey.py"):
        (folder / name).write_text(LIBRARY.format(function=function))
    program = PROGRAM.format(library=library, function=function)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(f"{folder.name} has replaced Python's threads") == 2
