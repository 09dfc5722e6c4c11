"""Parts of the GPU benchmarks that run on a CPU."""

from __future__ import annotations

import pytest

from aioengine import AsyncEngine, plugins
from aioengine.families._config import DecoderConfig
from benchmarks.gpu import limits, models, step_profile, workloads


def test_overlapping_kernels_count_once() -> None:
    events = [{"ts": 0.0, "dur": 1000.0}, {"ts": 500.0, "dur": 1000.0}, {"ts": 3000.0, "dur": 500.0}]
    assert step_profile.busy_ms(events) == pytest.approx(2.0)
    assert step_profile.busy_ms([{"ts": 0.0, "dur": 900.0}, {"ts": 100.0, "dur": 100.0}]) == pytest.approx(0.9)


@pytest.mark.process
@pytest.mark.slow
async def test_the_split_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "WATCHED_S", 0.2)
    async with AsyncEngine(context_length=512) as engine:
        times = await step_profile.split(engine, num_rows=3, num_tokens=380)
    assert times.keys() == {
        "step", "schedule", "prepare", "launch", "sample", "device", "collect", "apply", "detokenize", "frontend"
    }  # fmt: skip
    assert all(times[name] > 0 for name in ("step", "schedule", "prepare", "launch", "sample", "apply"))
    assert times["device"] == 0
    lines = step_profile.table({3: times}).splitlines()
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


PEAKS = 1e12, 1e15


def config_of(name: str, **fields: object) -> DecoderConfig:
    config = {**models.MODELS[name], **fields}
    config_of_family = plugins.load("families", str(config["model_type"])).read(config)
    assert isinstance(config_of_family, DecoderConfig)
    return config_of_family


def test_a_decode_step_reads_the_weights_and_the_positions_once() -> None:
    config = config_of("b")
    weights, kv = 8_030_261_248 - 128_256 * 4096, 2 * 32 * 8 * 128
    result = limits.limits(config, limits.Step(4, 1, 100, 0.0), PEAKS)
    assert result.reading == pytest.approx(2 * (weights + 4 * 101 * kv) / 1e12)
    assert result.computing == pytest.approx(2 * 4 * (weights + 101 * 2 * 32 * 32 * 128) / 1e15, rel=1e-3)
    assert result.seconds == result.reading


def test_only_selected_experts_count_as_read() -> None:
    config = config_of("a3b")
    few, all_of_them = (limits.limits(config, limits.Step(1, 1, 0, hits), PEAKS) for hits in (8.0, 128.0))
    assert few.computing == all_of_them.computing
    assert all_of_them.reading - few.reading == pytest.approx(2 * 48 * 120 * 3 * 2048 * 768 / 1e12)
    assert limits.expected_hits(config, 1) == pytest.approx(8)
    assert 127.9 < limits.expected_hits(config, 256) < 128


@pytest.mark.parametrize(("num_new", "num_before"), [(1, 3), (1, 90), (40, 0), (7, 8), (9, 30)])
def test_tokens_attend_to_a_window(num_new: int, num_before: int) -> None:
    window = 10
    shorter = limits.limits(config_of("b"), limits.Step(1, num_new, num_before, 0.0), PEAKS)
    config = config_of("b", model_type="mistral", sliding_window=window, rope_scaling=None)
    result = limits.limits(config, limits.Step(1, num_new, num_before, 0.0), PEAKS)
    hidden = sum(max(position + 1 - window, 0) for position in range(num_before, num_before + num_new))
    assert shorter.computing - result.computing == pytest.approx(2 * 32 * hidden * 2 * 32 * 128 / 1e15, abs=1e-15)
    assert shorter.reading - result.reading == pytest.approx(2 * max(num_before - window, 0) * 2 * 32 * 8 * 128 / 1e12)
