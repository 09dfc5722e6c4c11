"""Spans of requests: their parents, their phases, and the names of their attributes."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import StatusCode

from aioengine import tracing
from aioengine.api.engine import AsyncEngine
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

FOUR = {"max_new_tokens": 4}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "Accept": "*/*"}


class Traced:
    """An engine, and the spans of its requests."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.engine: AsyncEngine = fake_async_engine()
        self.provider = TracerProvider(sampler=sampler)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracing.instrument(self.engine, self.provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def ids_of(span: ReadableSpan) -> tuple[str, str | None]:
    """Return the ids of the trace and the parent of a span."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}", None if span.parent is None else f"{span.parent.span_id:016x}"


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_parent_is_read_from_the_header() -> None:
    traced = Traced()
    async with traced.engine as engine:
        with traced.provider.get_tracer("app").start_as_current_span("another"):
            await engine.async_generate(["a", "b"], FOUR, external_trace_header=HEADERS)
            await engine.async_encode("c", external_trace_header=HEADERS)
    assert [ids_of(span) for span in traced.spans if span.name != "another"] == [(TRACE, PARENT)] * 3


async def test_without_a_header_the_current_span_is_the_parent() -> None:
    traced = Traced()
    async with traced.engine as engine:
        with traced.provider.get_tracer("app").start_as_current_span("app"):
            generation = engine.async_generate("a", FOUR)
        await generation
        await engine.async_generate("b", FOUR)
    app, first, second = traced.spans
    assert app.context is not None
    assert ids_of(first) == (f"{app.context.trace_id:032x}", f"{app.context.span_id:016x}")
    assert ids_of(second)[1] is None


async def test_phases_add_up_to_the_span() -> None:
    traced = Traced()
    async with traced.engine as engine:
        info = (await engine.async_generate("a", FOUR))["meta_info"]
    (span,) = traced.spans
    assert [event.name for event in span.events] == ["tokenize", "queue", "prefill", "decode", "deliver"]
    assert span.start_time is not None
    assert span.end_time is not None
    begun_ns = span.start_time
    for event in span.events:
        assert abs(event.timestamp - begun_ns) < 5  # rounded
        duration_s = (event.attributes or {})["aioengine.duration_s"]
        assert duration_s == dict(info["timings"])[f"{event.name}_s"]
        assert isinstance(duration_s, float)
        begun_ns += round(duration_s * 1e9)
    assert abs(span.end_time - begun_ns) < 10
    assert span.end_time - span.start_time == int(info["timings"]["total_s"] * 1e9)


async def test_attributes_describe_request_and_answer() -> None:
    traced = Traced()
    params = {"max_new_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11}
    async with traced.engine as engine:
        info = (await engine.async_chat([{"role": "user", "content": "a"}], params, rid="mine"))["meta_info"]
    (span,) = traced.spans
    assert span.name == "chat byte_model"
    actual = attributes_of(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "byte_model",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": info["timings"]["first_token_s"],
        "gen_ai.usage.input_tokens": info["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
    }
    assert {name: actual[name] for name in expected} == expected


async def test_names_follow_the_semantic_conventions() -> None:
    traced = Traced()
    async with traced.engine as engine:
        await engine.async_generate("a", FOUR)
        await engine.async_encode("a")
        with pytest.raises(ValueError, match="5000"):
            await engine.async_generate("x" * 5000)
    modules = (gen_ai_attributes, error_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    names = {name for span in traced.spans for name in attributes_of(span) if not name.startswith("aioengine.")}
    assert {name for name in names if name not in known} == set()
    assert len(names) > 15
    operations = {attributes_of(span)["gen_ai.operation.name"] for span in traced.spans}
    assert operations == {"text_completion", "embeddings"}


async def test_errors_and_left_streams_are_recorded() -> None:
    traced = Traced()
    async with traced.engine as engine:
        with pytest.raises(ValueError, match="5000"):
            await engine.async_generate("x" * 5000)
        async with engine.async_generate("a", {"max_new_tokens": 1500}, stream=True) as stream:
            await anext(stream)
        await until(lambda: len(traced.spans) == 2)
    failed, left = traced.spans
    assert (failed.status.status_code, attributes_of(failed)["error.type"]) == (
        StatusCode.ERROR,
        "RequestTooLargeError",
    )
    assert left.status.status_code is StatusCode.UNSET
    assert attributes_of(left)["gen_ai.response.finish_reasons"] == ("abort",)


async def test_unsampled_span_has_no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tracing, "_attributes")
    traced = Traced(ALWAYS_OFF)
    async with traced.engine as engine:
        await engine.async_generate("a", FOUR)
    assert traced.spans == ()


@pytest.mark.parametrize("headers", ["00-1-1-01", {1: "a"}, {"traceparent": b"00"}])
async def test_wrong_headers_are_refused(headers: object) -> None:
    async with fake_async_engine() as engine:
        with pytest.raises(TypeError, match="external_trace_header"):
            engine.async_generate("a", external_trace_header=headers)  # type: ignore[arg-type]
