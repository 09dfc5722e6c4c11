"""A program without free file descriptors gets an error that names the limit. No library aborts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.errors import EngineStartupError
from aioengine.testing.fake_engine import fake_engine
from tests.kit.source import ROOT

pytestmark = pytest.mark.process

HEAD = """
import asyncio, collections, json, os, random, resource, signal, sys, time
from aioengine.errors import EngineDeadError, EngineStartupError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine

held = []

def use_up():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass

def give_back(count):
    while held and count:
        os.close(held.pop())
        count -= 1

def kill(engine, place):
    pids = engine.get_all_child_pids()
    if place < len(pids):
        os.kill(pids[place], signal.SIGKILL)
"""

STARTS = """
async def start_async():
    async with fake_async_engine({"": "Paris."}, processes=True) as engine:
        return (await engine.async_generate("x"))["text"]

def start_sync():
    with fake_engine({"": "Paris."}, processes=True) as engine:
        return engine.generate("x")["text"]

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
results = []
for start in (lambda: asyncio.run(start_async()), start_sync):
    try:
        results.append(start())
    except (EngineStartupError, ValueError) as error:
        results.append(str(error))
print(json.dumps(results))
"""

TAKEN = """
import threading
from aioengine.supervision.launchers._child_folder import ChildFolder

start_child = ChildFolder.start

def start_and_use_up(folder, role, *args):
    child = start_child(folder, role, *args)
    if role.name == "detokenizer":  # the last
        use_up()
        give_back(2)
        threading.Timer(0.3, give_back, [1000]).start()
    return child

ChildFolder.start = start_and_use_up
"""

TAKEN_FROM_THE_LOOP = """
from aioengine.frontend import portal

start_thread = portal.start_thread

def use_up_and_start(*args, **options):
    use_up()
    give_back(2)
    return start_thread(*args, **options)

portal.start_thread = use_up_and_start
"""

TAKEN_AT_THE_START = """
from aioengine.frontend import startup

function = getattr(startup, sys.argv[2])

def use_up_after(*args):
    function(*args)
    use_up()

setattr(startup, sys.argv[2], use_up_after)
"""

NEW_ENGINE = """
from aioengine import AsyncEngine

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
use_up()
try:
    AsyncEngine()
except EngineStartupError as error:
    print(json.dumps(str(error)))
"""

STORM = """
draw = random.Random(int(sys.argv[1]))

async def ask(engine):
    try:
        await asyncio.wait_for(engine.async_generate("x", {"max_new_tokens": 60}), 30)
    except EngineDeadError:
        return "dead"
    return "answered"

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    async with fake_async_engine(processes=True, step_time_s=0.003, max_restarts=100) as engine:
        calls = []
        for _ in range(6):
            try:
                calls += [asyncio.create_task(ask(engine)) for _ in range(4)]
                await asyncio.sleep(draw.random() * 0.1)
                use_up()
                kill(engine, draw.randrange(2))
                for _ in range(draw.randrange(40)):
                    await asyncio.sleep(0.01)
                    use_up()
                give_back(draw.choice([1, 5, 20, 1000]))
                await asyncio.sleep(draw.random() * 0.5)
            except EngineDeadError:
                break
        give_back(1000)
        return collections.Counter(await asyncio.gather(*calls))

print(json.dumps(asyncio.run(main())))
"""


CONNECTION = """
import subprocess, zmq
from aioengine.transport.async_zmq import AsyncZmqReceiver

SENDER = '''
import sys, time, zmq
from aioengine.protocol.messages import Abort
from aioengine.transport.zmq import ZmqSender
sys.stdin.readline()
ZmqSender(zmq.Context(), sys.argv[1], 7, listens=True).send([Abort([1])])
sys.stdin.readline()
'''

async def main():
    endpoint = f"ipc://{sys.argv[1]}/sender"
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    receiver = AsyncZmqReceiver(zmq.Context(), 7)
    receiver.attach(endpoint)
    child = subprocess.Popen([sys.executable, "-c", SENDER, endpoint], stdin=subprocess.PIPE)
    use_up()
    child.stdin.write(b"listen\\n")
    child.stdin.flush()
    waiting = asyncio.create_task(receiver.receive())
    while not os.path.exists(endpoint.removeprefix("ipc://")):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    was_done = waiting.done()
    give_back(10)
    messages = await asyncio.wait_for(waiting, 30)
    receiver.close()
    child.kill()
    child.wait()
    return was_done, [message.uids for message in messages]

print(json.dumps(asyncio.run(main())))
"""


def run(program: str, *argv: object) -> object:
    command = [sys.executable, "-W", "error", "-c", HEAD + program, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def check_start(limit: int) -> None:
    actual = run(STARTS, limit)
    assert isinstance(actual, list)
    for text in actual:
        wanted = f"free: this program may open {limit} at a time; raise that limit (ulimit -n, or"
        assert text == "Paris." or (text.startswith("an engine needs") and wanted in text), text


@pytest.mark.parametrize("limit", [25, 56, 64])
def test_start_succeeds_or_names_the_descriptor_limit(limit: int) -> None:
    check_start(limit)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_start_succeeds_or_names_the_limit_at_every_limit() -> None:
    for limit in range(8, 80):
        check_start(limit)


def test_start_succeeds_with_few_descriptors() -> None:
    assert run(STARTS, 80) == ["Paris.", "Paris."]


def test_start_survives_if_another_thread_takes_the_descriptors() -> None:
    result = run(TAKEN + STARTS, 200)
    assert isinstance(result, list)
    for text in result:
        assert text == "Paris." or "Too many open files" in text or text.startswith("an engine needs"), text


def test_start_names_the_limit_if_another_thread_takes_the_descriptors_of_the_loop() -> None:
    result = run(TAKEN_FROM_THE_LOOP + STARTS, 200)
    assert isinstance(result, list)
    assert result[0] == "Paris."
    assert result[1].startswith("an engine needs 8 free file descriptors, and only 2 are free")


@pytest.mark.parametrize("function", ["require_descriptors", "show_logs"])
def test_start_names_the_limit_if_other_threads_take_all_descriptors(function: str) -> None:
    result = run(TAKEN_AT_THE_START + STARTS, 200, function)
    assert isinstance(result, list)
    assert all("free: this program may open 200 at a time" in text for text in result), result


def test_new_engine_without_descriptors_names_the_limit() -> None:
    assert "only 0 are free: this program may open 100 at a time" in str(run(NEW_ENGINE))


def test_start_without_the_null_device_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    with pytest.raises(EngineStartupError, match=rf"needs {tmp_path}/null, which cannot be opened: .*No such file"):
        fake_engine()


def test_connection_waits_until_a_descriptor_is_free(tmp_path: Path) -> None:
    assert run(CONNECTION, tmp_path) == [False, [[1]]]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_every_call_ends_while_processes_die_and_descriptors_run_out(seed: int) -> None:
    result = run(STORM, seed)
    assert isinstance(result, dict)
    assert set(result) <= {"answered", "dead"}
