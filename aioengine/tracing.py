"""Traces for OpenTelemetry (extra ``metrics``): a span for each request, named as GenAI semantic conventions say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from opentelemetry import context, propagate, trace

from aioengine.frontend.info import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from aioengine.api.engine import BaseEngine
    from aioengine.frontend.calls.observers import FinishedRequest

__all__ = ["instrument"]

_OPERATIONS: Final = {
    "chat": "chat",
    "generate": "text_completion",
    "encode": "embeddings",
    "rerank": "rerank",
}
"""``FinishedRequest.operation`` -> ``gen_ai.operation.name``."""

_PHASES: Final = ("tokenize_s", "queue_s", "prefill_s", "decode_s", "deliver_s")
"""Keys of ``Timings``. A phase begins at the end of the one before."""


def instrument(engine: BaseEngine, tracer_provider: TracerProvider | None = None) -> None:
    """Record a span for each request of later calls, when it ends.

    Its parent is in the ``external_trace_header`` of the call. Without one, it is the current span of the code that
    makes the call.

    tracer_provider: where spans are recorded; None: the global provider.
    """
    engine.add_observer(partial(_record, trace.get_tracer("aioengine", __version__, tracer_provider)))


def _record(tracer: Tracer, request: FinishedRequest) -> None:
    info, operation = request.meta_info, _OPERATIONS[request.operation]
    model = request.lora_path or request.model_path.rstrip("/").rpartition("/")[2]
    # With None, the SDK would look up the current context three times.
    parent = propagate.extract(request.trace_headers) if request.trace_headers else context.get_current()
    start_ns = int(request.called_at * 1e9)
    span = tracer.start_span(
        f"{operation} {model}",
        parent,
        attributes={"gen_ai.operation.name": operation, "gen_ai.request.model": model},
        start_time=start_ns,
    )
    if span.is_recording():
        span.set_attributes(_attributes(request))
        if request.error is not None:
            span.set_attribute("error.type", type(request.error).__qualname__)
            span.set_status(trace.StatusCode.ERROR, str(request.error))
        _add_phases(span, request, start_ns)
    span.end(start_ns + int(info["timings"]["total_s"] * 1e9))


def _attributes(request: FinishedRequest) -> dict[str, AttributeValue]:
    info, params = request.meta_info, request.sampling_params
    reason = "error" if request.error is not None else str(info["finish_reason"])
    attributes: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "aioengine",
        "gen_ai.response.id": info["id"],
        "gen_ai.response.model": request.model_path,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": info["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": info["cached_tokens"],
        "aioengine.num_preemptions": info["num_preemptions"],
    }
    if request.operation in ("chat", "generate"):
        attributes |= {
            "gen_ai.request.stream": request.is_stream,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.seed": info["seed"],
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.usage.output_tokens": info["completion_tokens"],
        }
        optional = {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.response.time_to_first_chunk": info["timings"]["first_token_s"],
        }
        attributes |= {name: value for name, value in optional.items() if value is not None}
    return attributes


def _add_phases(span: Span, request: FinishedRequest, start_ns: int) -> None:
    """Add an event at the beginning of each phase. Their durations add up to the span."""
    begun_s = 0.0
    for key in _PHASES:
        duration_s = request.meta_info["timings"][key]
        name = key.removesuffix("_s")
        span.add_event(name, {"aioengine.duration_s": duration_s}, timestamp=start_ns + int(begun_s * 1e9))
        begun_s += duration_s
