"""The metrics of an engine, read with Prometheus' parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aioengine import FinishedRequest
from aioengine.api.engine import AsyncEngine
from aioengine.metrics import engine_collector
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.faults import Faults
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

FOUR = {"max_new_tokens": 4}


class Scraped:
    """A registry with the metrics of an engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(engine_collector(engine))

    def values(self) -> dict[str, float]:
        """Return the samples by name without prefix, and by finish reason or bucket if they have one."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            assert family.documentation
            for sample in family.samples:
                name = " ".join([sample.name.removeprefix("aioengine_"), *sample.labels.values()])
                assert name not in values
                values[name] = sample.value
        return values


def test_a_registry_refuses_a_second_engine() -> None:
    scraped = Scraped(fake_async_engine())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        scraped.registry.register(engine_collector(fake_async_engine()))


async def test_counts_and_times_equal_those_of_the_answers() -> None:
    engine = fake_async_engine()
    scraped = Scraped(engine)
    async with engine:
        outs = await engine.async_generate(["a", "bc", "def"], FOUR)
        outs.append(await engine.async_generate("g", {"max_new_tokens": 1}))
        with pytest.raises(ValueError, match="5000 tokens"):
            await engine.async_generate("x" * 5000)
        async with engine.async_generate("h", {"max_new_tokens": 1500}, stream=True) as stream:
            await anext(stream)
        await until(lambda: (engine.stats()["num_finished"], engine.stats()["num_aborted"]) == (4, 1))
        values = scraped.values()
    timings = [info["timings"] for info in outs["meta_info"]]
    assert {name: value for name, value in values.items() if name.startswith("requests_total")} == {
        "requests_total length": 4,
        "requests_total error": 1,
        "requests_total abort": 1,
    }
    assert values["time_to_first_token_seconds_count"] == 5
    assert values["e2e_request_latency_seconds_count"] == values["request_queue_time_seconds_count"] == 6
    assert values["time_to_first_token_seconds_sum"] > sum(cast("float", timing["first_token_s"]) for timing in timings)
    assert values["request_decode_time_seconds_sum"] > sum(timing["decode_s"] for timing in timings)
    assert values["e2e_request_latency_seconds_bucket +Inf"] == 6
    assert values["request_time_per_output_token_seconds_count"] in (3, 4)  # the last stream may have only one token
    assert values["prompt_tokens_total"] == 1 + 2 + 3 + 1 + 1
    assert values["generation_tokens_total"] >= 3 * 4 + 1 + 1
    assert (values["up"], values["kv_pages"], values["kv_pages_free"]) == (1, 1024, 1024)


async def test_the_mean_time_between_tokens_is_observed_once_for_each_request() -> None:
    engine = fake_async_engine()
    scraped = Scraped(engine)
    async with engine:
        timings = (await engine.async_generate("a", {"max_new_tokens": 11}))["meta_info"]["timings"]
        values = scraped.values()
    assert values["request_time_per_output_token_seconds_count"] == 1
    assert values["request_time_per_output_token_seconds_sum"] == pytest.approx(timings["decode_s"] / 10)
    assert values["time_to_first_token_seconds_sum"] == timings["first_token_s"]
    assert values["e2e_request_latency_seconds_sum"] == timings["total_s"]


async def test_the_hit_rate_can_be_computed() -> None:
    engine = fake_async_engine()
    scraped = Scraped(engine)
    async with engine:
        infos = [(await engine.async_generate("p" * 100, FOUR))["meta_info"] for _ in range(3)]
        await until(lambda: engine.stats()["num_finished"] == 3)
        values = scraped.values()
    assert values["prompt_tokens_total"] == 300
    assert values["cached_prompt_tokens_total"] == sum(info["cached_tokens"] for info in infos) >= 2 * 96


async def test_stopped_engine_has_no_gauges() -> None:
    engine = fake_async_engine()
    scraped = Scraped(engine)
    assert (scraped.values()["up"], "kv_pages" in scraped.values()) == (0, False)
    async with engine:
        await engine.async_generate("a", FOUR)
        assert (scraped.values()["up"], "kv_pages" in scraped.values()) == (1, True)
    values = scraped.values()
    assert (values["up"], "kv_pages" in values, values["requests_total length"]) == (0, False, 1)
    async with engine:  # counters continue
        await engine.async_generate("a", FOUR)
        assert scraped.values()["requests_total length"] == 2


class Stopped:
    """An engine whose counters are known."""

    is_alive = True

    def __init__(self, stats: dict[str, int]) -> None:
        self.known = stats

    def stats(self) -> dict[str, int]:
        return self.known

    def add_observer(self, observer: Callable[[FinishedRequest], object]) -> None:
        """Do nothing, because no request ends."""


async def test_every_counter_of_the_engine_has_a_metric() -> None:
    async with fake_async_engine() as engine:
        stats = {key: place for place, key in enumerate(engine.stats(), 1)}
    values = Scraped(cast("AsyncEngine", Stopped(stats))).values()
    names = {
        "num_requests_running": "num_running", "num_requests_waiting": "num_waiting",
        "num_requests_open": "num_streams", "kv_pages": "num_pages", "kv_pages_free": "num_free_pages",
        "kv_pages_cached": "num_cached_pages", "sessions": "num_sessions", "lora_adapters": "num_adapters",
        "prompt_tokens_total": "prompt_tokens", "cached_prompt_tokens_total": "cached_tokens",
        "generation_tokens_total": "output_tokens", "preemptions_total": "num_preemptions",
        "steps_total": "num_steps", "restarts_total": "num_restarts",
    }  # fmt: skip
    assert {name: values[name] for name in names} == {name: stats[key] for name, key in names.items()}


@pytest.mark.process
async def test_a_request_that_survives_a_killed_process_is_counted_once(tmp_path: object) -> None:
    engine = fake_async_engine(faults=Faults(kill_at=3, once=f"{tmp_path}/killed"))
    scraped = Scraped(engine)
    async with engine:
        outs = await engine.async_generate(["a", "b"], {"max_new_tokens": 20})
        assert outs["meta_info"]["completion_tokens"] == [20, 20]
        values = scraped.values()
    assert (values["requests_total length"], values["restarts_total"]) == (2, 1)
