"""Engines in working directories that were removed, and in folders whose names are not UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from aioengine.errors import EngineStartupError
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.protocol.orders import decode_orders, encode_orders
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.faults import Faults
from tests.kit.source import ROOT
from tests.processes.engine_kit import fake_orders

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names and removals"),
]

ODD_NAME = b"caf\xe9"
HEAD = """
import os, shutil, signal, sys
sys.path.append(os.environ["ROOT"])
from aioengine import Engine

def answer(engine):
    return engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 4})["text"]
"""
RUN = """
with Engine(sys.argv[1] if len(sys.argv) > 1 else None, device="cpu") as engine:
    first = answer(engine)
    assert "Paris" in first
    engine.get_server_info(), engine.get_model_info()
"""
RECOVER = """
from aioengine.testing.fake_engine import fake_engine

with fake_engine(processes=True) as engine:
    first = answer(engine)
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    pid = next(process["pid"] for process in engine.health()["processes"] if process["role"] == "scheduler")
    os.kill(pid, signal.SIGKILL)
    assert answer(engine) == first
    assert engine.stats()["num_restarts"] == 1
"""
REMOVE = "shutil.rmtree(os.getcwd())\n"


def failing(model: str, message: str) -> str:
    return f"""
try:
    Engine({model!r})
except (ValueError, RuntimeError) as error:
    assert {message!r} in str(error), error
else:
    raise SystemExit("it started")
"""


def run(script: str, *arguments: bytes, cwd: Path | bytes, **environment: bytes) -> None:
    file = os.path.join(os.fsencode(cwd), b"script.py")
    with open(file, "w") as stream:
        stream.write(script)
    inherited = {**os.environb, b"ROOT": os.fsencode(ROOT)}
    given = {os.fsencode(name): value for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, file, *arguments], cwd=cwd, env={**inherited, **given}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_lost_process_is_replaced_after_the_working_directory_was_removed(tmp_path: Path) -> None:
    run(HEAD + RECOVER, cwd=tmp_path)


@pytest.mark.slow
def test_an_engine_starts_in_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    run(HEAD + REMOVE + RUN, cwd=tmp_path)


@pytest.mark.slow
def test_relative_path_in_a_removed_directory_is_an_error(tmp_path: Path) -> None:
    for model in ("./model", "model"):
        folder = tmp_path / model
        folder.mkdir()
        run(HEAD + REMOVE + failing(model, "no such folder"), cwd=folder, HF_HUB_OFFLINE=b"1")


def test_folders_of_scripts_models_and_sockets_may_have_any_name(tmp_path: Path) -> None:
    odd = os.path.join(os.fsencode(tmp_path), ODD_NAME)
    sockets = os.path.join(odd, b"sockets")
    os.makedirs(sockets)
    shutil.copytree(os.fsencode(DEMO_MODEL), os.path.join(odd, b"model"))
    run(HEAD + RUN, b"model", cwd=odd, XDG_RUNTIME_DIR=sockets)
    assert os.listdir(sockets) == []


def test_a_failed_start_names_an_odd_folder(tmp_path: Path) -> None:
    odd = os.path.join(os.fsencode(tmp_path), ODD_NAME)
    shutil.copytree(os.fsencode(DEMO_MODEL), os.path.join(odd, b"model"))
    os.truncate(os.path.join(odd, b"model", b"model.safetensors"), 1000)
    run(HEAD + failing("model", "model.safetensors"), cwd=odd)


def test_orders_hold_paths_that_are_not_utf_8() -> None:
    orders = fake_orders(board=os.fsdecode(b"/tmp/caf\xe9/x.board"))
    line = encode_orders(orders)
    assert b"\n" not in line
    assert decode_orders(line) == orders


async def test_process_that_cannot_write_its_log_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full."""

    class FullDisk(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            with open("/dev/full", "wb") as log:
                super().__init__(*arguments, **options | {"stdout": log, "stderr": log})

    monkeypatch.setattr(subprocess, "Popen", FullDisk)
    engine = fake_async_engine(processes=True, faults=Faults(start_error="no such model"))
    with pytest.raises(EngineStartupError, match="InjectedFault: no such model"):
        await engine.start()
