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
import asyncio, json, resource, sys
from aioengine.errors import EngineStartupError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
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
found = []
for start in (lambda: asyncio.run(start_async()), start_sync):
    try:
        found.append(start())
    except EngineStartupError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def run(program: str, *argv: object) -> object:
    command = [sys.executable, "-W", "error", "-c", HEAD + program, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def check_start(limit: int) -> None:
    found = run(STARTS, limit)
    assert isinstance(found, list)
    for text in found:
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


def test_start_without_the_null_device_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    with pytest.raises(EngineStartupError, match=rf"needs {tmp_path}/null, which cannot be opened: .*No such file"):
        fake_engine()
