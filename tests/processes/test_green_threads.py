"""In a program whose threads and sockets a library has replaced, a start is an error that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process

# What ``gevent.monkey.patch_all`` and ``eventlet.monkey_patch`` do, as far as an engine can see it: functions and
# classes of the standard library become those of a module of the library.
LIBRARY = """
import _thread, queue, select, socket, subprocess, threading

def start_new_thread(function, args=(), kwargs={{}}):
    pass  # a green thread, which runs when this one waits: never

def green_select(*args):
    pass

class SimpleQueue:
    pass

class Socket(socket.socket):
    pass

class Popen(subprocess.Popen):
    pass

PLACES = {{
    "thread": [(_thread, "start_new_thread", start_new_thread), (threading, "_start_new_thread", start_new_thread)],
    "queue": [(queue, "SimpleQueue", SimpleQueue)],
    "select": [(select, "select", green_select)],
    "socket": [(socket, "socket", Socket)],
    "subprocess": [(subprocess, "Popen", Popen)],
}}

def {function}(*left_out):
    for name, places in PLACES.items():
        if name not in left_out:
            for module, attribute, value in places:
                setattr(module, attribute, value)
"""
PROGRAM = """
import sys
from {library} import {function}
{function}(*sys.argv[1:])
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
NAMES = {"thread": "threads", "queue": "queues", "select": "select", "socket": "sockets", "subprocess": "subprocesses"}


GEVENT, EVENTLET = ("gevent.monkey", "patch_all"), ("eventlet", "monkey_patch")


@pytest.mark.parametrize(
    ("patch", "left_out"),
    [
        (GEVENT, []),
        (GEVENT, ["queue", "select", "socket", "subprocess"]),
        (GEVENT, ["thread", "select"]),
        (GEVENT, list(NAMES)),
        (EVENTLET, ["queue"]),
        (EVENTLET, list(NAMES)),
    ],
)
def test_start_names_replaced_functions(patch: tuple[str, str], left_out: list[str], tmp_path: Path) -> None:
    library, function = patch
    folder = tmp_path / library.partition(".")[0]
    folder.mkdir()
    for name in ("__init__.py", "monkey.py"):
        (folder / name).write_text(LIBRARY.format(function=function))
    program = PROGRAM.format(library=library, function=function)
    done = subprocess.run(
        [sys.executable, "-c", program, *left_out],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    replaced = ", ".join(text for name, text in NAMES.items() if name not in left_out)
    wanted = f"{folder.name} has replaced Python's {replaced} in this program ({library}.{function}), and an engine"
    for line in done.stdout.splitlines():
        assert line.startswith(wanted if replaced else "Paris.")
    assert len(done.stdout.splitlines()) == 2
