"""Observers receive each ended request exactly once, for all kinds of ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioengine import FinishedRequest
from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError, RequestTooLargeError
from aioengine.frontend.calls.observers import Observers
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.fake_adapters import write_adapter
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.one_loop

FOUR = {"max_new_tokens": 4}
ENDLESS = {"max_new_tokens": 1500}


def observed(engine: AsyncEngine) -> list[FinishedRequest]:
    requests: list[FinishedRequest] = []
    engine.add_observer(requests.append)
    return requests


async def test_a_request_is_reported_before_its_answer_is_read() -> None:
    engine = fake_async_engine()
    requests = observed(engine)
    async with engine:
        answer = await engine.async_generate("hello", FOUR | {"seed": 3})
        (request,) = requests
    assert request.meta_info == answer["meta_info"]
    assert (request.operation, request.is_stream, request.error, request.lora_path) == ("generate", False, None, None)
    assert (request.sampling_params.max_new_tokens, request.sampling_params.sampling_seed) == (4, 3)
    assert request.model_path.endswith("byte_model")


async def test_rows_streams_chats_and_vectors_are_reported() -> None:
    engine = fake_async_engine()
    requests = observed(engine)
    async with engine:
        outs = await engine.async_generate(["a", "b"], FOUR | {"n": 2})
        assert [request.meta_info for request in requests] == [out["meta_info"] for out in outs]
        chunks = [chunk async for chunk in engine.async_generate("c", FOUR, stream=True)]
        assert requests[-1].meta_info == chunks[-1]["meta_info"]
        assert requests[-1].is_stream
        await engine.async_chat([{"role": "user", "content": "d"}], FOUR)
        await engine.async_encode(["e", "f"])
    assert [request.operation for request in requests] == ["generate"] * 5 + ["chat"] + ["encode"] * 2


async def test_left_and_refused_requests_are_reported_once() -> None:
    engine = fake_async_engine()
    requests = observed(engine)
    async with engine:
        with pytest.raises(RequestTooLargeError) as raised:
            await engine.async_generate("x" * 5000)
        assert requests.pop().error is raised.value

        async with engine.async_generate("a", ENDLESS, stream=True) as stream:
            num_read = len((await anext(stream))["output_ids"])
        await until(lambda: requests)
        left = requests.pop()
        assert (left.meta_info["finish_reason"], left.error) == ("abort", None)
        assert left.meta_info["completion_tokens"] >= num_read

        outs = await engine.async_generate(["ok", "x" * 5000], FOUR, return_exceptions=True)
        assert {type(request.error) for request in requests} == {type(None), RequestTooLargeError}
        assert len(requests) == len(outs)
        await engine.drain()
    assert len(requests) == 2


async def test_open_requests_are_reported_with_the_error_of_a_closed_engine() -> None:
    engine = fake_async_engine()
    requests = observed(engine)
    async with engine:
        stream = engine.async_generate("a", ENDLESS, stream=True)
        await anext(stream)
    with pytest.raises(EngineClosedError):
        _ = [chunk async for chunk in stream]
    await asyncio.sleep(0)
    assert [type(request.error).__name__ for request in requests] == ["EngineClosedError"]


async def test_unchecked_rows_of_an_aborted_batch_are_reported() -> None:
    engine = fake_async_engine(max_running=1)
    requests = observed(engine)
    async with engine:
        params: list[Any] = [{"max_new_tokens": 1000 + i % 7} for i in range(3000)]
        generation = engine.async_generate(["a"] * 3000, params, lora_path=None)
        await asyncio.sleep(0)
        generation.abort()
        outs = await generation
        assert {str(out["meta_info"]["finish_reason"]) for out in outs} == {"abort"}
    assert len(requests) == 3000


async def test_a_request_has_the_name_of_its_adapter(tmp_path: Any) -> None:
    engine = fake_async_engine(max_loras_per_batch=2)
    requests = observed(engine)
    async with engine:
        assert engine.stats()["num_adapters"] == 0
        assert await engine.load_lora_adapter("mine", write_adapter(tmp_path))
        assert engine.stats()["num_adapters"] == 1
        await engine.async_generate(["a", "b"], FOUR, lora_path=[None, "mine"])
    assert [request.lora_path for request in sorted(requests, key=lambda request: request.meta_info["id"])] == [
        None,
        "mine",
    ]


@pytest.mark.parametrize("kind", [ZeroDivisionError, asyncio.CancelledError])
async def test_exceptions_of_observers_do_not_affect_requests(kind: type[BaseException]) -> None:
    engine, reports = fake_async_engine(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))

    def fail(request: FinishedRequest) -> None:
        raise kind

    engine.add_observer(fail)
    requests = observed(engine)
    async with engine:
        outs = await engine.async_generate(["a", "b"], FOUR)
        assert outs["meta_info"]["completion_tokens"] == [4, 4]
    assert [type(report["exception"]) for report in reports] == [kind] * 2
    assert len(requests) == 2


async def test_an_observer_may_change_its_meta_info() -> None:
    engine = fake_async_engine()
    engine.add_observer(lambda request: request.meta_info.clear())
    async with engine:
        chunks = [chunk async for chunk in engine.async_generate("a", FOUR, stream=True)]
    assert chunks[-1]["meta_info"]["finish_reason"] == "length"


async def test_added_observer_receives_later_calls_also_of_the_next_run() -> None:
    engine = fake_async_engine()
    async with engine:
        early = engine.async_generate("a", FOUR)
        requests = observed(engine)
        await early
        assert requests == []
        await engine.async_generate("b", FOUR)
    async with engine:
        await engine.async_generate("c", FOUR)
    assert len(requests) == 2


async def test_nothing_is_recorded_without_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Observers, "_add")
    async with fake_async_engine() as engine:
        assert (await engine.async_generate("a", FOUR))["meta_info"]["completion_tokens"] == 4


def test_synchronous_engine_reports_requests() -> None:
    requests: list[FinishedRequest] = []
    with fake_engine() as llm:
        llm.add_observer(requests.append)
        answer = llm.generate("a", FOUR)
        assert wait_until(lambda: requests)
    assert [request.meta_info for request in requests] == [answer["meta_info"]]
