"""A program as users write it, checked by mypy and pyright in strict mode: every type here is what the call gives."""

from __future__ import annotations

from typing import Literal, assert_type

from aioengine import (
    Answer,
    AsyncEngine,
    BatchOutput,
    ChunkIterator,
    Engine,
    EngineOverloadedError,
    FinishReason,
    Generation,
    RequestTooLargeError,
    SamplingParams,
    Stream,
    async_stream_and_merge,
    stream_and_merge,
)


async def with_asyncio(is_stream: bool) -> None:
    async with AsyncEngine(max_running_requests=8) as engine:
        answer = await engine.async_generate("Once upon a time", {"max_new_tokens": 64})
        assert_type(answer["text"], str)
        assert_type(answer["output_ids"], list[int])
        assert_type(answer["meta_info"]["completion_tokens"], int)
        reason = answer["meta_info"]["finish_reason"]
        assert_type(reason, FinishReason)
        assert_type(reason["type"], Literal["stop", "length", "abort", "deadline", "shutdown"])
        assert_type(reason["length"], int)
        assert_type(reason["message"], str)
        assert_type(reason["matched"], str | int | None)
        assert_type(answer["meta_info"]["timings"]["total_s"], float)

        answers = await engine.async_generate(["a", "b"], SamplingParams(temperature=0))
        assert_type(answers, BatchOutput)
        assert_type([entry["text"] for entry in answers], list[str])

        async for chunk in engine.async_generate("a", stream=True):
            assert_type(chunk["text"], str)
            assert_type(chunk["text_offset"], int)
            assert_type(chunk["meta_info"]["finish_reason"], FinishReason | None)

        stream = await engine.async_generate(input_ids=[1, 2, 3], stream=True)
        async with stream:
            async for chunk in stream:
                print(chunk["text"], end="", flush=True)

        either = engine.async_generate("a", stream=is_stream)
        assert_type(either, Generation[Answer] | Generation[BatchOutput] | Stream)
        conversation = [{"role": "user", "content": "Hi"}]
        assert_type(await engine.async_chat(conversation), Answer)
        assert_type(await engine.async_chat([conversation]), BatchOutput)
        either = engine.async_chat(conversation, stream=is_stream)
        assert_type(either, Generation[Answer] | Generation[BatchOutput] | Stream)

        async for text in async_stream_and_merge(engine, "a", {"temperature": 0.5}):
            assert_type(text, str)
        assert_type(await engine.admit(), None)
        assert_type(engine.attach("mine", from_offset=3), Stream)
        assert_type(await engine.drain(timeout=5), bool)


def without_asyncio(is_stream: bool) -> None:
    with Engine() as llm:
        assert_type(llm.generate("a")["text"], str)
        assert_type(llm.generate(["a", "b"]), BatchOutput)
        assert_type(llm.generate(input_ids=[[1], [2]]), BatchOutput)
        assert_type(llm.generate("a", stream=is_stream), Answer | BatchOutput | ChunkIterator)
        assert_type(llm.async_generate("a", stream=True), Stream)
        for chunk in llm.generate("a", stream=True):
            assert_type(chunk["text"], str)
        assert_type(stream_and_merge(llm, "a", SamplingParams()), str)
        reply = llm.chat([{"role": "user", "content": "Hi"}])
        assert_type(reply["text"], str)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        assert_type(llm.chat(parts, stream=is_stream), Answer | BatchOutput | ChunkIterator)
        try:
            llm.generate("a", timeout=5.0, refuse_late=True, priority=1, tenant="gold", rid="mine")
        except EngineOverloadedError as error:
            assert_type(error.retry_after, float)
        except RequestTooLargeError as error:
            print(error)
        assert_type(llm.stats()["num_running"], int)
        assert_type([chunk["text"] for chunk in llm.attach("mine")], list[str])
        assert_type(llm.async_attach("mine"), Stream)
        assert_type(llm.is_alive, bool)
