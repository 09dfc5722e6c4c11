"""Every example runs unchanged, prints the expected output, and leaves nothing behind."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from io import StringIO
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import aioengine
from aioengine import Engine
from benchmarks.train_demo_adapter.__main__ import STYLES
from benchmarks.train_demo_adapter.__main__ import train as train_adapter
from benchmarks.train_demo_vision_model import training as vision
from tests.kit.source import ROOT
from tests.kit.waiting import wait_until

EXAMPLES = ROOT / "examples"
PROMPTS = ("The capital of Norway is", "The capital of Egypt is")
SCRIPTS = {
    "01_sync.py": r"The capital of France is Paris.*The capital of Japan is Tokyo.*\[(stop|length)\]",
    "02_sync_streaming.py": r"\S+.*\n.*\S+ \.\.\.",
    "03_async.py": r"France: Paris.*Peru: Lima.*stopped by deadline after \d+ tokens",
    "04_async_streaming.py": r"so far: ' Paris.*ended by abort, \d+ tokens",
    "05_batch.py": r'\{"prompt": "The capital of Norway is", "text": " Oslo.*"\}',
    "06_session.py": r"Tokyo.*Cairo.*Lima.*\[\d+ of \d+ prompt tokens were not computed again\].*Oslo",
    "07_structured_output.py": r"Ada is 36.* -> Person\(name='.*', age=\d+, city='.*(Lima|Oslo|Rome)",
    "08_search.py": r"Norway is: The capital of Norway is Oslo.*Egypt is: Cairo is the capital",
    "09_scores.py": r"Norway: Europe \(.*Egypt: Africa \(",
    "12_quantization.py": r"16 bits: 8\.7 MB .* Paris.*int8: 4\.4 MB .* Paris.*int4: 2\.8 MB .* Paris",
    "13_reinforcement.py": r"default: mean reward 0\.\d+\nstep-1: .*step-5: mean reward 0\.\d+",
}
ALONE = "03_async.py"
"""Also runs in a process of its own. All run in the process of the tests, because imports take seconds."""
OWN_ENGINES = ("12_quantization.py", "13_reinforcement.py")
"""The other scripts share an engine, because each start takes seconds."""
TRAINED = {
    "10_adapters.py": r"base: The capital of Norway is Oslo.*pirate: .*brief: ",
    "11_images.py": r"\n.*picture\? .*\[0 tokens were cached\].*yellow\? .*\[\d\d+ tokens were cached\]",
}
"""Those that are given the folder of what they would train, which the tests make with few steps; the whole runs are in
``test_train_*.py``."""
SERVERS = ("fastapi_server.py", "aiohttp_server.py", "ray_serve.py")


def test_every_example_is_run_by_a_test() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SCRIPTS, *TRAINED, *SERVERS}


@pytest.mark.parametrize("name", [*SCRIPTS, *TRAINED, *SERVERS])
def test_an_example_is_short(name: str) -> None:
    num_lines = (EXAMPLES / name).read_text().count("\n")
    assert num_lines <= (120 if name in SERVERS else 40)


@pytest.mark.process
@pytest.mark.slow
def test_a_script_runs_in_its_own_process() -> None:
    """In Python's development mode, with warnings as errors."""
    command = [sys.executable, "-X", "dev", "-W", "error", str(EXAMPLES / ALONE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(SCRIPTS[ALONE], done.stdout, re.DOTALL), done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def run_here(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_ENGINES)
def test_a_script_runs_with_its_own_engines(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(name, monkeypatch)
    printed = capsys.readouterr().out
    assert re.search(SCRIPTS[name], printed, re.DOTALL), printed
    if name == "13_reinforcement.py":
        first, *_, last = map(float, re.findall(r"reward ([\d.]+)", printed))
        assert last > first + 0.05, printed


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine() as running:
        yield running


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in OWN_ENGINES])
def test_a_script_runs_on_a_shared_engine(
    name: str, llm: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shared(model: None = None, *, progress: bool = False) -> AbstractContextManager[Engine]:
        return nullcontext(llm)

    lines = ("Norway", "Egypt") if name == "09_scores.py" else PROMPTS
    for engine in ("Engine", "AsyncEngine"):
        monkeypatch.setattr(aioengine, engine, shared)
    monkeypatch.setattr(sys, "stdin", StringIO("".join(f"{line}\n" for line in lines)))
    run_here(name, monkeypatch)
    printed = capsys.readouterr()
    assert re.search(SCRIPTS[name], printed.out, re.DOTALL), printed.out
    if name == "05_batch.py":
        assert printed.err.endswith("10 prompt tokens, 39 output tokens\n")  # it is that of all prompts
    assert wait_until(lambda: llm.stats()["num_streams"] == llm.stats()["num_sessions"] == 0)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # a warning of peft
@pytest.mark.slow
@pytest.mark.parametrize("name", ["10_adapters.py", "11_images.py"])
def test_script_runs_with_the_trained_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_a_little(name, tmp_path)
    capsys.readouterr()
    run_here(name, monkeypatch, str(tmp_path))
    printed = capsys.readouterr().out
    assert re.search(TRAINED[name], printed, re.DOTALL), printed


def train_a_little(name: str, folder: Path) -> None:
    """Run one training step of the script into this folder."""
    if name == "11_images.py":
        processor = vision.make_processor(vision.make_tokenizer())
        model = vision.make_model(processor.tokenizer)
        vision.train(model, processor, num_steps=1, num_rows=1)
        vision.save(model, processor, folder)
        return
    for style in STYLES:
        train_adapter(style, 1, num_rows=1).save_pretrained(folder / style)


# ---------------------------------------------------------------- the notebook


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.process
async def test_the_notebook_runs_inside_a_running_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells run one after the other on the loop's thread, and may have ``await`` at the top level."""
    assert asyncio.get_running_loop().is_running()
    names: dict[str, Any] = {}
    for cell in cells():
        code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await run_cell(code, names)
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "['" in shown
    assert not names["llm"].is_alive


async def run_cell(code: CodeType, names: dict[str, Any]) -> None:
    from inspect import CO_COROUTINE

    result = eval(code, names)
    if code.co_flags & CO_COROUTINE:
        await result


def test_the_notebook_has_no_outputs() -> None:
    notebook = json.loads(Path(EXAMPLES / "notebook.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
