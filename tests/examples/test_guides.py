"""All code in README and the guides runs, and prints the output on the page.

A block of Python that imports an engine is a program. The first one runs in its own process, and the others in the
process of the tests. All other blocks are pieces. The pieces of a page run one after the other in a running loop with
``engine`` (an ``AsyncEngine``) and ``llm`` (an ``Engine``), as the list of guides says. Shell lines run if they call
``aioengine``.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from inspect import CO_COROUTINE
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

import aioengine
from aioengine import AsyncEngine, Engine
from aioengine.cli import batch, benchmark, commands, main
from aioengine.frontend.startup import blueprint_of
from aioengine.settings.config import EngineConfig
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.image_models import add_image_files
from tests.kit.pages import GUIDES, README, Block, blocks, place
from tests.kit.source import ROOT
from tests.kit.tiny_sizes import VOCAB_SIZE
from tests.kit.vision_models import IMAGE, save_vision_model

pytestmark = pytest.mark.process

PAGES = [README, *sorted(GUIDES.glob("*.md"))]
IMAGES = GUIDES / "images.md"
RUN_ELSEWHERE = {GUIDES / "openai.md", GUIDES / "ray.md"}
"""tests/openai_api/test_openai_client.py and tests/processes/test_ray_data.py run their code."""
NOT_RUN = ("pip install", "uvicorn server:app", "curl ", "python examples/", "aioengine serve", "AIOENGINE_API_KEY=")
"""Beginnings of shell lines that install, serve without an end, ask a server, or train."""


def is_program(block: Block) -> bool:
    is_set_up = "engine = AsyncEngine()\nawait" in block.code  # for the prompt of python -m asyncio
    return bool(re.search(r"^from aioengine import .*\b(Async)?Engine\b", block.code, re.MULTILINE)) and not is_set_up


def is_served(block: Block) -> bool:
    """Return whether this is README's server, which tests/examples/test_servers.py runs."""
    return "FastAPI(" in block.code


def blocks_of_pages(language: str, *, programs: bool = False) -> Iterator[tuple[Path, Block]]:
    for page in PAGES:
        if page in RUN_ELSEWHERE:
            continue
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == language and is_program(block) is programs and not is_served(block):
                yield page, block


def run(command: list[str], given: str | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command,
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


FIRST, *OTHERS = blocks_of_pages("python", programs=True)


def test_first_program_runs_in_its_own_process(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(FIRST[1].code, encoding="utf-8")
    assert run([sys.executable, "-W", "error", str(file)])


@pytest.mark.parametrize("block", [pytest.param(block, id=f"{place(page)}:{block.line}") for page, block in OTHERS])
def test_a_program_runs(
    block: Block, llm: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program uses a shared engine, unless it configures its own."""

    def engine_of(*arguments: Any, **options: Any) -> AbstractContextManager[Engine]:
        return Engine(*arguments, **options) if arguments or options else nullcontext(llm)

    for name in ("Engine", "AsyncEngine"):
        monkeypatch.setattr(aioengine, name, engine_of)
    exec(block.code, {"__name__": "__main__"})
    printed = capsys.readouterr()
    assert printed.out == (block.output or printed.out)
    assert printed.out
    assert printed.err == ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop() -> asyncio.AbstractEventLoop:
    """The loop of ``engine``. It does not run during synchronous tests."""
    return asyncio.get_running_loop()


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine() as running:
        yield running


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny, untrained LLaVA."""
    folder = tmp_path_factory.mktemp("llava")
    save_vision_model("llava", folder)
    add_image_files(folder, "llava", IMAGE, VOCAB_SIZE)
    return folder


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", sorted({page for page, _ in blocks_of_pages("python")} - {IMAGES}), ids=place)
async def test_the_pieces_of_a_page_run(
    page: Path, engine: AsyncEngine, llm: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the pages do not remove their temporary folders
    if page == GUIDES / "README.md":  # this page starts and ends the engines of the other pages
        monkeypatch.setattr(aioengine, "Engine", fake_engine)
        monkeypatch.setattr(aioengine, "AsyncEngine", fake_async_engine)
    await run_pieces(page, {"engine": engine, "llm": llm, "asyncio": asyncio})


@pytest.mark.asyncio(loop_scope="module")
async def test_the_pieces_of_the_page_about_images_run(
    vision_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine(vision_model, device="cpu") as vlm:
        await run_pieces(IMAGES, {"vlm": vlm, "engine": vlm, "asyncio": asyncio})


async def run_pieces(page: Path, names: dict[str, Any]) -> None:
    for _, block in (entry for entry in blocks_of_pages("python") if entry[0] == page):
        printed = await run_piece(block, names, place(page))
        assert printed == (block.output or printed), f"{place(page)}:{block.line}"


async def run_piece(block: Block, names: dict[str, Any], name: str) -> str:
    """Run a block, and return its output."""
    padded = "\n" * block.line + block.code  # line numbers of tracebacks are those of the page
    code = compile(padded, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with redirect_stdout(StringIO()) as printed:
        result = eval(code, names)
        if code.co_flags & CO_COROUTINE:
            await result
    return printed.getvalue()


def shell_lines() -> list[str]:
    return [line for _, block in blocks_of_pages("bash") for line in block.code.splitlines()]


@pytest.mark.parametrize("line", dict.fromkeys(line for line in shell_lines() if not line.startswith(NOT_RUN)))
def test_a_shell_line_runs(
    line: str,
    llm: Engine,
    engine: AsyncEngine,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The line runs in this process with a shared engine. Its configuration is only checked."""
    first, _, second = line.rpartition(" | ")
    given = run(shlex.split(first)) if first else ""
    command = shlex.split(second)
    assert command[0] == "aioengine", "is it one that can be run? Else it belongs into NOT_RUN"

    def sharing(shared: Engine | AsyncEngine) -> SimpleNamespace:
        def from_config(config: EngineConfig) -> object:
            blueprint_of(config)
            return nullcontext(shared)

        return SimpleNamespace(from_config=from_config)

    monkeypatch.setattr(commands, "Engine", sharing(llm))
    for module in (batch, benchmark):
        monkeypatch.setattr(module, "AsyncEngine", sharing(engine))
    monkeypatch.setattr(asyncio, "run", loop.run_until_complete)
    (tmp_path / "given").write_text(given, encoding="utf-8")
    with (tmp_path / "given").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as ended:
            sys.exit(main(command[1:]))  # --version exits
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert printed.err == ""
