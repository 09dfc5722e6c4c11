"""Children of unusual parents: killed programs, ending threads, odd folders, terminals, foreign files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq

from aioengine.child_process.host import limit_threads
from aioengine.protocol.messages import FinishCode, Limits, Sampling
from aioengine.testing.fake_runner import FakeModel
from aioengine.transport.addresses import PrivateDirectory
from aioengine.transport.zmq import ZmqSender
from tests.kit.fake_reference import reference_output
from tests.kit.source import ROOT
from tests.processes.engine_kit import Frontend, fake_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process

PARENT = """
import asyncio, sys
sys.path.append({root!r})
from tests.processes.engine_kit import Frontend

async def main():
    async with Frontend() as frontend:
        frontend.submit(1)
        await frontend.finished(1)
        print(*(state.pid for state in frontend.supervisor.process_states()), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


class Parent:
    """A program that runs an engine until it reads a line."""

    def __init__(self, directory: Path, *, cwd: Path | None = None, **environment: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", PARENT.format(root=str(ROOT))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "XDG_RUNTIME_DIR": str(directory), **environment},
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        self.children = [psutil.Process(int(pid)) for pid in self.popen.stdout.readline().split()]
        assert len(self.children) == 2, self.popen.communicate()

    def end(self) -> tuple[str, str]:
        """Let the program end by itself, and return its output."""
        written = self.popen.communicate("\n", timeout=60)
        assert self.popen.returncode == 0, written
        return written


@pytest.fixture
def base() -> Iterator[Path]:
    """Return a folder with a short path, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="aio-", dir="/tmp") as place:
        yield Path(place)


def are_gone(children: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(children, timeout=30)
    return not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_children_end_with_a_parent_that_is_killed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Parent(base)
    parent.popen.kill()
    parent.popen.communicate()
    assert are_gone(parent.children)
    assert len(list(base.iterdir())) == 1
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    PrivateDirectory().remove()
    assert list(base.iterdir()) == []


def test_children_that_do_not_run_python_end_with_their_parent(base: Path) -> None:
    """Stopped children cannot watch their standard input, but the kernel kills them."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells children of their parent's death")
    parent = Parent(base)
    for child in parent.children:
        child.suspend()
    parent.popen.kill()
    parent.popen.communicate()
    assert are_gone(parent.children)


def test_normal_end_prints_nothing_and_children_have_names(base: Path) -> None:
    parent = Parent(base)
    names = [" ".join(child.cmdline()) for child in parent.children]
    assert names[0].endswith("aioengine::scheduler")
    assert names[1].endswith("aioengine::detokenizer")
    short = [Path(f"/proc/{child.pid}/comm").read_text().strip() for child in parent.children]
    assert short == ["aioengine:sched", "aioengine:detok"]
    assert parent.end() == ("", "")
    assert are_gone(parent.children)
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_of_the_terminal_do_not_end_the_children(base: Path, number: signal.Signals) -> None:
    parent = Parent(base)
    for child in parent.children:
        assert os.getpgid(child.pid) != os.getpgid(parent.popen.pid)
        if number == signal.SIGINT:
            child.send_signal(number)
    time.sleep(0.3)
    assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in parent.children)
    os.killpg(parent.popen.pid, number)
    parent.popen.communicate(timeout=60)
    assert are_gone(parent.children)


def test_files_of_the_working_directory_are_never_imported(base: Path, tmp_path: Path) -> None:
    for name in ("queue", "msgspec", "zmq", "aioengine", "logging", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    parent = Parent(base, cwd=tmp_path)
    assert parent.end() == ("", "")


def test_engine_works_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir(parents=True)
    assert len(str(long)) > zmq.IPC_PATH_MAX_LEN
    parent = Parent(long, TMPDIR=str(long))
    assert parent.end() == ("", "")
    assert list(long.iterdir()) == []


def test_children_outlive_the_thread_that_started_them(base: Path) -> None:
    started: list[Frontend] = []

    async def begin() -> None:
        frontend = Frontend()
        await frontend.supervisor.start()
        started.append(frontend)

    loop = asyncio.new_event_loop()  # ``asyncio.run`` would cancel the tasks of the engine, which ends it
    thread = threading.Thread(target=lambda: loop.run_until_complete(begin()))
    thread.start()
    thread.join()
    (frontend,) = started
    time.sleep(0.5)
    assert [state.alive for state in frontend.supervisor.process_states()] == [True, True]
    frontend.supervisor.kill_now()
    assert [state.alive for state in frontend.supervisor.process_states()] == [False, False]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def test_fork_of_the_host_leaves_the_children_alone() -> None:
    async with Frontend() as frontend:
        with warnings.catch_warnings(action="ignore"):
            fork = os.fork()
        if fork == 0:
            frontend.supervisor.kill_now()
            os._exit(0)
        await asyncio.to_thread(os.waitpid, fork, 0)
        frontend.submit(1)
        await frontend.finished(1)
    assert frontend.failures == []


async def test_garbage_on_the_channels_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async with Frontend() as frontend:
        launcher = frontend.supervisor._incarnation._launcher
        directory = launcher._folder.path  # type: ignore[attr-defined]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for name in ("scheduler", "detokenizer"):
            with context.socket(zmq.PUSH) as stranger:
                stranger.connect(f"ipc://{directory}/{name}")
                for data in (b"", b"\x01", b"\x01\x92\x05\x90", b"GET / HTTP/1.1", os.urandom(1000)):
                    stranger.send(data)
                stranger.setsockopt(zmq.LINGER, 1000)
        context.term()
        await asyncio.sleep(0.1)
        frontend.submit(1)
        await frontend.finished(1)
        assert [state.alive for state in frontend.supervisor.process_states()] == [True, True]
        with contextlib.suppress(TimeoutError):
            await frontend.idle_stats()
    dropped = [record for record in caplog.records if "dropped a frame" in record.getMessage()]
    assert len(dropped) == 2
    assert frontend.failures == []


async def test_damaged_frames_from_outside_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may send frames truncated or enlarged, in another order, from many senders."""
    frames: list[bytes] = []
    plain = ZmqSender._offer

    def overheard(self: ZmqSender, frame: bytes) -> None:
        frames.append(frame)
        plain(self, frame)

    monkeypatch.setattr(ZmqSender, "_offer", overheard)
    async with Frontend(fake_settings(step_time_s=0.002)) as frontend:
        for uid in range(8):
            frontend.submit(uid, num_tokens=40)
            await asyncio.sleep(0.005)
        launcher = frontend.supervisor._incarnation._launcher
        directory = launcher._folder.path  # type: ignore[attr-defined]
        draw = random.Random(1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for name in ("scheduler", "detokenizer"):
            with context.socket(zmq.PUSH) as stranger:
                stranger.connect(f"ipc://{directory}/{name}")
                stranger.setsockopt(zmq.LINGER, 1000)
                for frame in [*reversed(frames), *frames]:
                    stranger.send(frame[: draw.randrange(len(frame))])
                    stranger.send(frame + os.urandom(draw.randrange(1, 10_000)))
        context.term()
        for uid in range(8):
            end = await frontend.finished(uid)
            assert end.code == FinishCode.LENGTH
            prompt = [(uid * 7 + index) % 900 for index in range(5)]
            expected = reference_output(prompt, Sampling(seed=uid), Limits(40), FakeModel(vocab_size=1000))
            assert frontend.token_ids(uid) == expected
        stats = await frontend.idle_stats()
        assert (stats.num_finished, stats.num_free_pages) == (8, stats.num_pages)
        assert frontend.failures == []


def test_engine_runs_without_shared_memory_and_writable_tmpdir() -> None:
    """/dev/shm is missing and TMPDIR is read-only and long, in a container if the system allows it."""
    script = f"""
set -e
umount /dev/shm 2>/dev/null || mount -t tmpfs -o ro none /dev/shm
mkdir -p /tmp/{"x" * 180} && mount -t tmpfs -o ro none /tmp/{"x" * 180}
exec env TMPDIR=/tmp/{"x" * 180} {sys.executable} -P -c "$PROGRAM"
"""
    probe = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script],
        env={**os.environ, "PROGRAM": PARENT.format(root=str(ROOT))},
        input=b"\n",
        capture_output=True,
        check=False,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, b""), done
    os.rmdir(f"/tmp/{'x' * 180}")


async def test_engine_does_not_change_the_state_of_the_program() -> None:
    def state() -> list[object]:
        return [
            {number: signal.getsignal(number) for number in signal.valid_signals()},
            dict(os.environ),
            list(sys.path),
            asyncio.get_running_loop().get_exception_handler(),
            asyncio.get_event_loop_policy(),
            sys.excepthook,
            threading.excepthook,
            (logging.root.level, list(logging.root.handlers)),
            list(warnings.filters),
            multiprocessing.get_start_method(allow_none=True),
            (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()),
            locale.setlocale(locale.LC_ALL),
            sys.getswitchinterval(),
            os.getcwd(),
        ]

    before = state()
    async with Frontend(fake_settings()) as frontend:
        frontend.submit(1)
        await frontend.finished(1)
        assert state() == before
    assert state() == before


@pytest.mark.parametrize("wished", ["ACTIVE", None])
def test_threads_are_limited_and_sleep_soon_by_default(wished: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OMP_NUM_THREADS": "7"} | ({} if wished is None else {"OMP_WAIT_POLICY": wished})
    monkeypatch.setattr(os, "environ", environment)
    limit_threads(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment.get("GOMP_SPINCOUNT") == ("1000" if wished is None else None)
    assert environment.get("OMP_WAIT_POLICY") == wished


FREEING = """
import resource
from aioengine.child_process.host import keep_freed_memory

keep_freed_memory()
block = bytearray(8 << 20)
del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = bytearray(8 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators have other ways")
def test_freed_memory_is_reused_without_system_calls() -> None:
    done = subprocess.run([sys.executable, "-c", FREEING], cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 1000  # one block has 2048 pages
