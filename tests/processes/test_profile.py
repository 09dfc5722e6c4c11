"""Profiles: contents of the traces, start and stop, refused calls."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioengine import Engine
from aioengine.runner.profile import Profile
from aioengine.scheduler.plan import TOKENS, Row, StepPlan
from aioengine.testing.fake_engine import fake_async_engine

PROMPT = "Once upon a time"


def ranges(path: str | Path) -> list[str]:
    """Return the names of the engine's ranges, in order of time."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    return [mark["name"] for mark in sorted(marks, key=lambda mark: mark["ts"])]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.mark.process
def test_trace_has_a_range_for_each_step(engine: Engine, tmp_path: Path) -> None:
    engine.start_profile(tmp_path / "new", profile_prefix="mine")
    num_before = engine.stats()["num_steps"]
    engine.generate([PROMPT, "a"], {"max_new_tokens": 5, "ignore_eos": True})
    path = Path(engine.stop_profile())
    assert path.parent == tmp_path / "new"
    assert re.fullmatch(r"mine-\d{8}-\d{6}-\d+-\d+\.trace\.json\.gz", path.name)
    steps = [name for name in ranges(path) if name.startswith("step ")]
    assert len(steps) == engine.stats()["num_steps"] - num_before
    assert steps[-1] == f"step {num_before + len(steps)}: 2 rows, 2 tokens"
    assert {"schedule", "collect", "apply"} <= set(ranges(path))


@pytest.mark.process
def test_profile_ends_after_num_steps(engine: Engine, tmp_path: Path) -> None:
    engine.start_profile(tmp_path, num_steps=3, activities=["CPU"])
    engine.generate(PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
    engine.start_profile(tmp_path, num_steps=1)
    path = engine.stop_profile()
    written = [file for file in tmp_path.iterdir() if str(file) != path]
    assert [len([name for name in ranges(file) if name.startswith("step ")]) for file in written] == [3]


@pytest.mark.process
def test_invalid_starts_and_stops_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no profile is being made"):
        engine.stop_profile()
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="could not be started: NotADirectoryError"):
        engine.start_profile(tmp_path / "file" / "folder")
    engine.start_profile(tmp_path)
    with pytest.raises(RuntimeError, match=f"being made already, to be written to {tmp_path}"):
        engine.start_profile(tmp_path)
    engine.stop_profile()
    with pytest.raises(RuntimeError, match="no profile is being made"):
        engine.stop_profile()


async def test_async_engine_checks_the_arguments_of_a_profile(tmp_path: Path) -> None:
    async with fake_async_engine() as engine:
        with pytest.raises(TypeError, match="'num_step'.*did you mean 'num_steps'.*allowed: output_dir, num_steps"):
            await engine.start_profile(tmp_path, num_step=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="output_dir must be a path or None, got 3 of type int"):
            await engine.start_profile(3)  # type: ignore[arg-type]
        for options, words in (
            ({"num_steps": 0}, "num_steps must be an integer of at least 1"),
            ({"activities": 3}, "activities must be a list of strings, got 3"),
            ({"activities": [3]}, "activities entries must be one of 'CPU', 'GPU', 'MEM', got 3"),
            ({"with_stack": 0}, "with_stack must be True or False, got 0"),
            ({"activities": ["TPU"]}, "activities entries must be one of 'CPU', 'GPU', 'MEM'"),
            ({"profile_prefix": "a/b"}, "profile_prefix must be"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                await engine.start_profile(tmp_path, **options)


@pytest.mark.process
def test_profile_may_have_stacks_shapes_and_memory(engine: Engine, tmp_path: Path) -> None:
    engine.start_profile(tmp_path, with_stack=True, record_shapes=True, activities=["CPU", "MEM"])
    engine.generate("a", {"max_new_tokens": 2})
    assert any(name.startswith("step ") for name in ranges(engine.stop_profile()))


def test_ranges_do_nothing_without_a_profile() -> None:
    profile = Profile(lambda _: None)
    nothing = profile.part("schedule")
    assert profile.launch(1, StepPlan([Row(1, 0, 1, TOKENS)])) is nothing


def test_stop_reports_why_a_profile_could_not_be_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    profile = Profile(lambda _: None)
    started = profile.start(
        folder=str(tmp_path / "gone"), prefix="", num_steps=1, activities="CPU", with_stack=False, record_shapes=False
    )
    assert started == (True, "", "")
    for number in (1, 2):
        with profile.launch(number, StepPlan([Row(1, 0, 1, TOKENS)])):
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    success, message, _ = profile.stop()
    assert not success
    assert message.startswith("the profile could not be written: ")
    assert profile.stop()[1].startswith("no profile is being made")


def test_failed_start_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def fail(_: object) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    success, message, _ = Profile(lambda _: None).start(
        folder=str(tmp_path), prefix="", num_steps=1, activities="CPU", with_stack=False, record_shapes=False
    )
    assert not success
    assert message == "a profile could not be started: RuntimeError: another profiler is active"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_made_before", [True, False])
def test_profile_follows_no_link(is_made_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    victim = tmp_path / "victim"
    victim.write_text("content")
    link = tmp_path / f"now-{os.getpid()}-1.trace.json.gz"
    if is_made_before:
        link.symlink_to(victim)
    profile = Profile(lambda _: None)
    success, message, _ = profile.start(
        folder=str(tmp_path), prefix="", num_steps=1, activities="CPU", with_stack=False, record_shapes=False
    )
    assert success is not is_made_before
    if is_made_before:
        assert message.startswith("a profile could not be started: FileExistsError")
    else:
        link.unlink()
        link.symlink_to(victim)
        profile.stop()
    assert victim.read_text() == "content"


@pytest.mark.slow
def test_profile_ends_with_the_engine(tmp_path: Path) -> None:
    """A program in which torch still records at its exit dies of a segmentation fault."""
    program = f"""
from aioengine.testing.fake_engine import fake_engine

with fake_engine(processes=False) as engine:
    engine.start_profile({str(tmp_path)!r})
    engine.generate("a", {{"max_new_tokens": 3}})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
