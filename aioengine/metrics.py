"""Metrics for Prometheus (extra ``metrics``)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aioengine.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.api.engine import BaseEngine
    from aioengine.frontend.calls.observers import FinishedRequest

__all__ = ["engine_collector"]

_GAUGES: Final = {
    "num_running": ("num_requests_running", "Requests that the scheduler computes."),
    "num_waiting": ("num_requests_waiting", "Requests in the queue of the scheduler."),
    "num_streams": ("num_requests_open", "Requests of open calls, including requests without a first token."),
    "num_pages": ("kv_pages", "Pages of the KV pool."),
    "num_free_pages": ("kv_pages_free", "Pages that can be allocated: free, or only held by the prefix cache."),
    "num_cached_pages": ("kv_pages_cached", "Pages in the prefix cache, in use or not."),
    "num_sessions": ("sessions", "Open sessions."),
    "num_adapters": ("lora_adapters", "Loaded LoRA adapters."),
}
"""Key of ``stats()`` -> name and description of a gauge."""

_COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, computed or from the prefix cache."),
    "cached_tokens": ("cached_prompt_tokens", "Prompt tokens from the prefix cache."),
    "output_tokens": ("generation_tokens", "Output tokens."),
    "num_preemptions": ("preemptions", "Requests that lost their pages to others, and were continued later."),
    "num_steps": ("steps", "Steps of the scheduler."),
    "num_proposed_drafts": ("proposed_drafts", "Drafts of speculation that were computed."),
    "num_accepted_drafts": ("accepted_drafts", "Drafts of speculation that were accepted."),
    "num_restarts": ("restarts", "Replacements of lost processes."),
}
"""Key of ``stats()`` -> name and description of a counter."""

_LATENCY_BUCKETS: Final = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip


_HISTOGRAMS: Final = {
    "time_to_first_token": ("Time from the call to the first token.", _LATENCY_BUCKETS),
    "request_time_per_output_token": (
        "Mean time between the tokens of a request, for requests with two tokens or more.",
        _TOKEN_BUCKETS,
    ),
    "e2e_request_latency": ("Time from the call to the end of the request.", _LATENCY_BUCKETS),
    "request_queue_time": ("Time in the queue of the scheduler.", _LATENCY_BUCKETS),
    "request_prefill_time": ("Time from the queue to the first token.", _LATENCY_BUCKETS),
    "request_decode_time": ("Time from the first token to the last.", _LATENCY_BUCKETS),
}
"""Name -> description and buckets of a histogram of seconds."""


def engine_collector(engine: BaseEngine) -> Collector:
    """Return a collector of the metrics of ``engine``, for a ``CollectorRegistry`` of ``prometheus_client``.

    Call it once for an engine, before or after its start. Two engines need two registries, because their metrics have
    the same names. Histograms and ``aioengine_requests_total`` have the requests of later calls.
    """
    return _EngineCollector(engine)


class _Histogram:
    """A histogram of seconds. An observation takes a tenth of the time of ``prometheus_client.Histogram``."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def metric(self, name: str, description: str) -> Metric:
        buckets = list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, description, buckets=buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine
        self._histograms = {name: _Histogram(buckets) for name, (_, buckets) in _HISTOGRAMS.items()}
        self._num_ended = Counter[str]()  # by finish reason
        engine.add_observer(self._observe)

    def _observe(self, request: FinishedRequest) -> None:
        info = request.meta_info
        timings, num_tokens = info["timings"], info["completion_tokens"]
        self._num_ended["error" if request.error is not None else str(info["finish_reason"])] += 1
        values = {"e2e_request_latency": timings["total_s"], "request_queue_time": timings["queue_s"]}
        if timings["first_token_s"] is not None:
            values["time_to_first_token"] = timings["first_token_s"]
            values["request_prefill_time"] = timings["prefill_s"]
            values["request_decode_time"] = timings["decode_s"]
            if num_tokens > 1:
                values["request_time_per_output_token"] = timings["decode_s"] / (num_tokens - 1)
        for name, value in values.items():
            self._histograms[name].observe(value)

    def describe(self) -> Iterable[Metric]:
        """Return a metric of this name, so that a registry refuses a second engine."""
        return [GaugeMetricFamily("aioengine_up", "")]

    def collect(self) -> Iterable[Metric]:
        is_alive = self._engine.is_alive
        yield GaugeMetricFamily("aioengine_up", "1 if the engine accepts or finishes requests.", value=is_alive)
        for name, (description, _) in _HISTOGRAMS.items():
            yield self._histograms[name].metric(f"aioengine_{name}_seconds", description)
        ended = CounterMetricFamily("aioengine_requests", "Ended requests by finish reason.", labels=["finish_reason"])
        for reason, number in self._num_ended.copy().items():  # the engine's loop may add to it at any time
            ended.add_metric([reason], number)
        yield ended
        try:
            stats = self._engine.stats()
        except EngineClosedError:  # it is not started yet, or shut down
            return
        for key, (name, description) in _GAUGES.items():
            yield GaugeMetricFamily(f"aioengine_{name}", description, value=stats[key])
        for key, (name, description) in _COUNTERS.items():
            yield CounterMetricFamily(f"aioengine_{name}", description, value=stats[key])
