"""What the benchmarks on a GPU are made of, as far as a CPU can run it."""

from __future__ import annotations

import pytest

from aioengine import AsyncEngine
from benchmarks.gpu import step_profile, workloads


def test_overlapping_kernels_count_once() -> None:
    events = [{"ts": 0.0, "dur": 1000.0}, {"ts": 500.0, "dur": 1000.0}, {"ts": 3000.0, "dur": 500.0}]
    assert step_profile.busy_ms(events) == pytest.approx(2.0)
    assert step_profile.busy_ms([{"ts": 0.0, "dur": 900.0}, {"ts": 100.0, "dur": 100.0}]) == pytest.approx(0.9)


@pytest.mark.process
async def test_the_split_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "WATCHED_S", 0.2)
    async with AsyncEngine(context_length=512) as engine:
        found = await step_profile.split(engine, num_rows=3, num_tokens=380)
    assert found.keys() == {
        "step", "schedule", "prepare", "launch", "sample", "device", "collect", "apply", "detokenize", "frontend"
    }  # fmt: skip
    assert all(found[name] > 0 for name in ("step", "schedule", "prepare", "launch", "sample", "apply"))
    assert found["device"] == 0
    lines = step_profile.table({3: found}).splitlines()
    assert (len(lines), lines[1].startswith("3 rows")) == (2, True)


def test_the_table_has_a_column_for_each_engine() -> None:
    figure = {"median": 2.5, "min": 2.0, "max": 3.0}
    text = workloads.table(
        {"aioengine": {"a": {"W1": {"offline tok/s": figure}, "start s": 3.0}}, "vllm": {"a": {"W3": {"error": "x"}}}}
    )
    lines = text.splitlines()
    assert lines[0].split() == ["aioengine", "vllm"]
    assert lines[1].split() == ["W1", "a", "offline", "tok/s", "2.500", "-"]
    assert len(lines) == 2
