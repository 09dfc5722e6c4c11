"""Log records in programs with and without a logging configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.model_files.model_folder import DEMO_MODEL
from tests.kit.source import ROOT

pytestmark = pytest.mark.process

LOSS = """
import logging, os, signal
from aioengine.logs import show_logs
from aioengine.testing.fake_engine import fake_engine
BEFORE
show_logs("info")  # as log_level="info" of an engine
with fake_engine(processes=True) as engine:
    AFTER
    os.kill(engine.get_all_child_pids()[0], signal.SIGKILL)
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
THROUGHPUT = """
import sys, time
from aioengine import Engine
from aioengine.frontend import throughput

throughput.INTERVAL_S = 0.0
with Engine(sys.argv[1], device="cpu", dtype="bfloat16", load_format="dummy", log_level="info") as engine:
    for num_tokens in (1, 2):  # the first statistics begin an interval
        engine.generate("x", {"max_new_tokens": 1})
        while engine.stats()["output_tokens"] < num_tokens:
            time.sleep(0.001)
"""
START = [
    "model: .*/model, 9 MB of weights",
    r"device: cpu, (1 thread|\d\d+ threads|[2-9] threads)",
    r"dtype: bfloat16 \(the checkpoint has float32; dtype='float32' keeps it\), attention: fused",
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


def test_info_level_logs_the_device_and_the_throughput_in_an_unconfigured_program(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    lines = stderr_of(THROUGHPUT, str(folder))
    assert len(lines) > len(START), lines
    for line, pattern in zip(lines, START, strict=False):
        assert re.fullmatch(r"INFO aioengine\S*: " + pattern, line)
    pattern = r"INFO \S*: [01] running, 0 waiting; .* prompt tokens/s .*, .* output tokens/s; KV pool \d % used"
    assert re.fullmatch(pattern, lines[-1])


OWN_FORMAT = 'logging.basicConfig(format="own %(message)s")'


def test_logging_of_the_program_gets_every_record_once() -> None:
    lines = stderr_of(LOSS.replace("BEFORE", OWN_FORMAT).replace("AFTER", ""))
    assert [line for line in lines if not line.startswith("own ")] == []
    for text in ("own model: ", "own ready", "killed by signal 9"):
        assert sum(text in line for line in lines) == 1


@pytest.mark.slow
def test_logging_that_is_configured_later_gets_every_record_once() -> None:
    lines = stderr_of(LOSS.replace("BEFORE", "").replace("AFTER", OWN_FORMAT))
    messages = [line for line in lines if "killed by signal 9" in line or "are replaced" in line]
    assert len(messages) == 2
    assert [line for line in lines if line.startswith("own ")] == messages


def test_a_level_that_the_program_has_set_is_kept() -> None:
    setup = 'logging.basicConfig(); logging.getLogger("aioengine").setLevel(logging.CRITICAL)'
    assert stderr_of(LOSS.replace("BEFORE", setup).replace("AFTER", "")) == []


def test_an_unconfigured_program_sees_that_a_process_was_replaced() -> None:
    (line,) = stderr_of(KILL, "3")
    assert re.fullmatch(
        r"the scheduler process \(pid \d+\) was killed by signal 9; new processes continue (1 request|0 requests)", line
    )


def test_an_unconfigured_program_sees_that_an_engine_has_ended() -> None:
    (line,) = stderr_of(KILL, "0")
    assert re.fullmatch(r"the engine has ended: the scheduler process \(pid \d+\) was killed by signal 9", line)
