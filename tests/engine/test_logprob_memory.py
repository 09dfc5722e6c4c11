"""``max_logprob_bytes``: memory for logprobs is reserved when a row starts, and freed after the row was read."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from aioengine import AsyncEngine, EngineOverloadedError, RequestError, RequestTooLargeError
from aioengine.frontend.engine_parts import Blueprint
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.settings.config import QueueConfig
from aioengine.testing.fake_engine import FakeSetup
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

POSITION = LogprobRules(num_top=30).position_bytes
ROW = 20 * POSITION
PARAMS = {"max_new_tokens": 20, "temperature": 0}
ASKED: dict[str, Any] = {"sampling_params": PARAMS, "return_logprob": True, "top_logprobs_num": 30}


@asynccontextmanager
async def engine_of(max_logprob_bytes: int, **setup: Any) -> AsyncIterator[AsyncEngine]:
    def blueprint() -> Blueprint:
        return replace(FakeSetup(**setup).blueprint(), queue=QueueConfig(max_logprob_bytes=max_logprob_bytes))

    async with AsyncEngine.from_blueprint(blueprint) as engine:
        yield engine


def num_reserved(engine: AsyncEngine) -> int:
    return engine._frontend_here().limits.num_logprob_bytes


async def test_logprobs_that_can_never_fit_are_refused_with_their_sizes() -> None:
    async with engine_of(ROW - 1) as engine:
        message = f"its logprobs may take {ROW} bytes but max_logprob_bytes={ROW - 1} are allowed"
        with pytest.raises(RequestTooLargeError, match=message):
            await engine.async_generate("a", **ASKED)
        with pytest.raises(RequestTooLargeError, match=message):
            await anext(engine.async_generate("a", stream=True, **ASKED))
        outs = await engine.async_generate(["a", "b"], return_exceptions=True, **ASKED | {"top_logprobs_num": [30, 29]})
        assert isinstance(outs[0], RequestTooLargeError)
        assert isinstance(outs[1], dict)
        prompt = {**ASKED, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        assert await engine.async_generate("a" * 18, **prompt)
        with pytest.raises(RequestTooLargeError, match=f"may take {ROW} bytes"):
            await engine.async_generate("a" * 19, **prompt)
        assert num_reserved(engine) == 0


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def cancel_wait(generation: Any) -> None:
    """Wait for an answer, and cancel the wait."""
    task = asyncio.ensure_future(generation)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def do_nothing(_: object) -> None:
    """Do nothing, so that the call is dropped."""


@pytest.mark.parametrize("finish", [read, lambda stream: stream.aclose(), do_nothing])
async def test_a_request_is_refused_until_an_unread_stream_was_read_or_left(
    finish: Callable[[Any], Awaitable[None]],
) -> None:
    async with engine_of(2 * ROW - 1) as engine:
        stream = engine.async_generate("a", stream=True, **ASKED)
        await until(lambda: engine.stats()["num_streams"] == 0)  # it has ended, and is unread
        message = f"open requests use max_logprob_bytes={2 * ROW - 1}"
        with pytest.raises(EngineOverloadedError, match=message) as caught:
            await engine.async_generate("b", **ASKED)
        assert caught.value.retry_after > 0
        await finish(stream)
        del stream
        await until(lambda: num_reserved(engine) == 0)
        assert await engine.async_generate("b", **ASKED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream": True},
        {"stream": True, "rid": "mine", "resume_ttl": 60},
        {"prompt": ["a", "b", ""], "return_exceptions": True},
        {"prompt": ["a", "b", "c" * 5000], "return_exceptions": True, "stream": True},
        {"prompt": ["a", "c" * 5000]},
        {"sampling_params": {**PARAMS, "n": 3}},
        {"sampling_params": {"max_new_tokens": 0}},
        {"timeout": 1e-6},
        {"timeout": 1e-6, "prompt": ["a"] * 200, "stream": True},
        {"session_params": {"id": "mine"}},
    ],
)
@pytest.mark.parametrize("end", ["finished", "unread", "aborted", "cancelled", "dropped", "closed"])
async def test_memory_is_freed_after_each_kind_of_end(options: dict[str, Any], end: str) -> None:
    async with engine_of(10**9) as engine:
        await engine.open_session(session_id="mine")
        call: Any = engine.async_generate(**{"prompt": "a", **ASKED, **options})
        consume = read if options.get("stream") else asyncio.gather
        try:
            if end == "aborted":
                call.abort()
            if end in ("finished", "aborted"):
                await consume(call)
            elif end == "unread":
                await until(lambda: engine.stats()["num_streams"] == 0)
            elif end == "cancelled":
                await cancel_wait(anext(call) if options.get("stream") else call)
            elif end == "closed":
                await call.aclose()
        except (RequestError, ValueError):
            assert any(len(prompt) > 1000 for prompt in options["prompt"])
        del call
        gc.collect()
        await until(lambda: engine.stats()["num_streams"] == num_reserved(engine) == 0)


async def test_rows_of_a_batch_wait_for_memory_instead_of_being_refused() -> None:
    prompts = [str(number) for number in range(40)]
    async with engine_of(2 * ROW) as engine:  # two rows at a time
        rows: dict[int, int] = {}
        async for chunk in engine.async_generate(prompts, stream=True, **ASKED):
            rows[chunk["index"]] = rows.get(chunk["index"], 0) + len(chunk["output_ids"])
        assert rows == dict.fromkeys(range(40), 20)
    short = "Paris."
    async with engine_of(2 * ROW + 40 * (len(short) + 1) * POSITION, answers={"": short}) as engine:
        outs = await engine.async_generate(prompts, **ASKED)  # their answers are shorter than max_new_tokens
        assert outs["text"] == [short] * 40
        assert num_reserved(engine) == 0


async def test_the_answers_of_a_whole_batch_must_fit_together() -> None:
    async with engine_of(3 * ROW) as engine:
        assert len(await engine.async_generate(["a"] * 3, **ASKED)) == 3
        with pytest.raises(RequestTooLargeError, match=f"may take {ROW} bytes, besides {3 * ROW} of other rows, but"):
            await engine.async_generate(["a"] * 4, **ASKED)
        await until(lambda: num_reserved(engine) == 0)
