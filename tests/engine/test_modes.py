"""Answers and streams, single prompts and batches, samples, and generations as coroutines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aioengine.api.answers import BatchOutput
from aioengine.api.params import SamplingParams
from aioengine.errors import EngineClosedError, EngineDeadError, RequestTooLargeError
from aioengine.frontend.intake.requests import PROMPTS_IN_PIECE
from aioengine.settings.config import QueueConfig
from tests.engine.engine_double import World, expected_text
from tests.kit.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6}


async def test_await_returns_the_answer(world: World) -> None:
    out = await world.engine.async_generate("hello", GREEDY)
    assert out["text"] == expected_text("hello", 6)
    assert out["output_ids"] == list(expected_text("hello", 6).encode())
    info = out["meta_info"]
    assert info["finish_reason"] == "length"
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == (5, 6, 1)
    assert "index" not in out
    json.dumps(out)


async def test_second_await_returns_the_same_answer(world: World) -> None:
    generation = world.engine.async_generate("hello", GREEDY)
    assert await generation is await generation


async def test_stream_returns_deltas_with_offsets(world: World) -> None:
    text, ids, num_chunks = "", list[int](), 0
    async for chunk in world.engine.async_generate("hello", GREEDY, stream=True):
        assert (chunk["text_offset"], chunk["token_offset"]) == (len(text), len(ids))
        text += chunk["text"]
        ids += chunk["output_ids"]
        num_chunks += 1
        assert chunk["meta_info"]["completion_tokens"] == len(ids)
        assert (chunk["meta_info"]["finish_reason"] is None) == (len(ids) < 6)
    assert text == expected_text("hello", 6)
    assert num_chunks == 6


async def test_await_of_a_stream_returns_the_stream(world: World) -> None:
    stream = await world.engine.async_generate("hello", GREEDY, stream=True)
    assert "".join([chunk["text"] async for chunk in stream]) == expected_text("hello", 6)
    assert await stream is stream


async def test_the_first_chunk_may_be_read_before_the_loop(world: World) -> None:
    stream = world.engine.async_generate("hello", GREEDY, stream=True)
    chunks = aiter(stream)
    assert aiter(chunks) is chunks
    first = await anext(chunks)
    rest = [chunk["text"] async for chunk in chunks]
    assert first["text"] + "".join(rest) == expected_text("hello", 6)
    assert len(rest) == 5


async def test_a_second_loop_continues_where_the_first_one_stopped(world: World) -> None:
    stream = await world.engine.async_generate("hello", GREEDY, stream=True)
    text = ""
    for _ in range(2):
        async for chunk in stream:
            text += chunk["text"]
            if len(text) in {2, 4}:
                break
    assert await stream is stream
    assert world.engine.stats()["num_streams"] <= 1
    assert world.double.aborts == []
    text += "".join([chunk["text"] async for chunk in stream])
    assert text == expected_text("hello", 6)
    assert [chunk async for chunk in stream] == []


async def test_a_second_loop_raises_the_error_that_ended_the_first_one(world: World) -> None:
    world.double.is_held = True
    stream = world.engine.async_generate("hello", GREEDY, stream=True)
    await until(lambda: bool(world.double.live))
    world.double.events.on_failure(EngineDeadError("scheduler", pid=1, exit_code=1))
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass


async def test_iterating_a_left_stream_ends(world: World) -> None:
    stream = world.engine.async_generate("hello", GREEDY, stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    assert [chunk async for chunk in stream] == []


async def test_iterating_over_an_answer_is_a_type_error(world: World) -> None:
    generation = world.engine.async_generate("hello", GREEDY)
    with pytest.raises(TypeError, match="stream=True"):
        async for _ in generation:
            pass
    assert (await generation)["text"] == expected_text("hello", 6)


async def test_error_of_a_call_without_await_names_the_missing_await(world: World) -> None:
    whole: Any = world.engine.async_generate("a", GREEDY)
    stream: Any = world.engine.async_generate("a", GREEDY, stream=True)
    for read in (lambda: whole["text"], lambda: whole[0], lambda: list(whole)):
        with pytest.raises(TypeError, match="was not awaited: write `await` before the call"):
            read()
    for read in (lambda: stream[0], lambda: list(stream)):
        with pytest.raises(TypeError, match="with `async for`"):
            read()
    assert (await whole)["text"] == "".join([chunk["text"] async for chunk in stream])


async def test_stats_after_shutdown_raise_a_clear_error(world: World) -> None:
    assert world.engine.stats()["num_streams"] == 0
    await world.engine.shutdown()
    with pytest.raises(EngineClosedError, match="was shut down"):
        world.engine.stats()


async def test_the_request_starts_at_the_call(world: World) -> None:
    generation = world.engine.async_generate("hello", GREEDY)
    await until(lambda: bool(world.double.submits) and not world.double.live)
    assert (await generation)["text"] == expected_text("hello", 6)


async def test_requests_with_equal_parameters_differ_in_prompt_and_seed(world: World) -> None:
    stops = [100]
    params = SamplingParams(temperature=0, max_new_tokens=1, stop_token_ids=stops, stop="END")
    await world.engine.async_generate("hello", params)
    stops.append(101)  # the object has a copy
    async for _ in world.engine.async_generate("world", params, stream=True):
        pass
    for _ in range(2):
        await world.engine.async_generate("again", GREEDY)
    first, second, *others = world.double.submits
    assert (first.text.stream, first.text.context_token_ids, first.text.stop) == (False, tuple(b"hello"), ("END",))
    assert (second.text.stream, second.text.context_token_ids, second.text.stop) == (True, tuple(b"world"), ("END",))
    assert (first.limits.stop_token_ids[-1], second.limits.stop_token_ids[-1]) == (100, 100)
    assert len({submit.sampling.seed for submit in world.double.submits}) == 4
    assert [submit.limits.max_new_tokens for submit in others] == [6, 6]


async def test_prompt_may_be_token_ids(world: World) -> None:
    ids = list(b"hello")
    by_ids = await world.engine.async_generate(input_ids=ids, sampling_params=GREEDY, return_prompt_token_ids=True)
    assert by_ids["text"] == expected_text("hello", 6)
    assert by_ids["prompt_token_ids"] == ids
    batch = await world.engine.async_generate(None, GREEDY, input_ids=[ids, list(b"x")])
    assert batch["text"] == [expected_text("hello", 6), expected_text("x", 6)]


async def test_chat_uses_the_template(world: World) -> None:
    out = await world.engine.async_chat([{"role": "user", "content": "hi"}], GREEDY)
    assert out["text"] == expected_text("<user>hi<assistant>", 6)
    both = await world.engine.async_chat(
        [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], GREEDY
    )
    assert both["text"] == [expected_text(f"<user>{word}<assistant>", 6) for word in ("hi", "ho")]


async def test_a_message_that_calls_tools_needs_no_content(world: World) -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    out = await world.engine.async_chat([asked, {"role": "tool", "content": "4"}], GREEDY)
    assert out["text"] == expected_text("<assistant>None<tool>4<assistant>", 6)


async def test_repr_of_a_generation_has_its_id_and_state(world: World) -> None:
    world.double.is_held = True
    whole = world.engine.async_generate("a", GREEDY, rid="x")
    stream = world.engine.async_generate("a", GREEDY, rid="y", stream=True)
    failing = world.engine.async_generate("a" * 600, rid="z")
    assert [repr(whole), repr(stream)] == ["<Generation 'x' running>", "<Stream 'y' running>"]
    await stream.aclose()
    with pytest.raises(RequestTooLargeError):
        await failing
    world.double.resume()
    await whole
    assert [repr(whole), repr(stream)] == ["<Generation 'x' finished>", "<Stream 'y' left>"]
    assert repr(failing) == "<Generation 'z' failed>"


class TestBatches:
    async def test_answers_are_in_the_order_of_the_prompts(self, world: World) -> None:
        prompts = [f"prompt {number}" for number in range(30)]
        outs = await world.engine.async_generate(prompts, GREEDY)
        assert isinstance(outs, BatchOutput)
        assert outs["text"] == [expected_text(prompt, 6) for prompt in prompts]
        assert outs["meta_info"]["completion_tokens"] == [6] * 30
        assert [out["text"] for out in outs] == outs["text"]

    async def test_each_prompt_may_have_its_own_parameters(self, world: World) -> None:
        params = [{"temperature": 0, "max_new_tokens": length} for length in (1, 2, 3)]
        outs = await world.engine.async_generate(["a", "b", "c"], params)
        assert outs["text"] == ["t", "uv", "vwx"]

    async def test_batches_may_have_one_row_or_none(self, world: World) -> None:
        assert (await world.engine.async_generate(["a"], GREEDY))["text"] == [expected_text("a", 6)]
        assert await world.engine.async_generate([], GREEDY) == []
        assert [chunk async for chunk in world.engine.async_generate([], GREEDY, stream=True)] == []

    async def test_answers_of_a_long_batch_are_in_order(self, world: World) -> None:
        prompts = [f"{number}é"[number % 2 - 2 :] for number in range(PROMPTS_IN_PIECE + 40)]
        prompts[-7] = "\ud800"
        params_of_row = {"temperature": 0, "max_new_tokens": 1}
        with pytest.raises(ValueError, match="lone surrogate"):
            await world.engine.async_generate(prompts, params_of_row)
        outs = await world.engine.async_generate(prompts, params_of_row, return_exceptions=True)
        assert isinstance(outs.pop(len(prompts) - 7), ValueError)
        del prompts[-7]
        assert outs["text"] == [expected_text(prompt, 1) for prompt in prompts]

    async def test_chunks_of_a_batch_have_an_index(self, world: World) -> None:
        texts = ["", "", ""]
        ends = []
        async for chunk in world.engine.async_generate(["a", "b", "c"], GREEDY, stream=True):
            assert chunk["text_offset"] == len(texts[chunk["index"]])
            texts[chunk["index"]] += chunk["text"]
            if chunk["meta_info"]["finish_reason"] is not None:
                ends.append(chunk["index"])
        assert texts == [expected_text(prompt, 6) for prompt in "abc"]
        assert sorted(ends) == [0, 1, 2]

    async def test_rows_are_started_as_others_end(self) -> None:
        """A batch of any size is accepted, even if the queue is short."""
        here = World(max_running=4, queue=QueueConfig(max_requests=1, max_tokens=100))
        async with here.engine as engine:
            outs = await engine.async_generate(["x" * 20] * 200, GREEDY)
            assert outs["text"] == [expected_text("x" * 20, 6)] * 200
            assert here.double.max_live <= 8

    async def test_unread_batch_starts_no_more_rows(self) -> None:
        here = World(max_running=4)
        async with here.engine as engine:
            stream = engine.async_generate(["x"] * 100, GREEDY, stream=True)
            await until(lambda: bool(here.double.submits) and not here.double.live)
            assert len(here.double.submits) == 8
            chunks = [chunk async for chunk in stream]
            assert len({chunk["index"] for chunk in chunks}) == 100


class TestSamples:
    async def test_samples_are_adjacent_and_have_different_seeds(self, world: World) -> None:
        params = {"max_new_tokens": 3, "n": 3, "sampling_seed": 5}
        outs = await world.engine.async_generate(["a", "b"], params)
        assert outs["text"] == [expected_text(prompt, 3, seed=5 + sample) for prompt in "ab" for sample in range(3)]
        assert outs["meta_info"]["seed"] == [5, 6, 7, 5, 6, 7]
        assert world.tokenizer.batches == [["a", "b"]]

    async def test_samples_of_one_prompt_are_a_list(self, world: World) -> None:
        outs = await world.engine.async_generate("a", {**GREEDY, "n": 2}, rid="x")
        assert isinstance(outs, BatchOutput)
        assert outs["meta_info"]["id"] == ["x_0", "x_1"]

    async def test_drawn_seeds_differ_and_are_reported(self, world: World) -> None:
        outs = await world.engine.async_generate(["a"] * 20, {"max_new_tokens": 3})
        seeds = outs["meta_info"]["seed"]
        assert len(set(seeds)) == 20
        again = await world.engine.async_generate("a", {"max_new_tokens": 3, "sampling_seed": seeds[4]})
        assert again["text"] == outs[4]["text"]

    async def test_drawn_seeds_come_from_the_seed_of_the_engine(self, world: World) -> None:
        first = await world.engine.async_generate("a", GREEDY)
        other = World()
        async with other.engine as engine:
            assert (await engine.async_generate("b", GREEDY))["meta_info"]["seed"] == first["meta_info"]["seed"]


class TestAsCoroutine:
    async def test_generation_is_a_coroutine(self, world: World) -> None:
        generation = world.engine.async_generate("a", GREEDY)
        assert isinstance(generation, Coroutine)
        assert asyncio.iscoroutine(generation)
        await generation

    async def test_generation_works_with_create_task_and_gather(self, world: World) -> None:
        task = asyncio.create_task(world.engine.async_generate("a", GREEDY))
        outs = await asyncio.gather(*(world.engine.async_generate(prompt, GREEDY) for prompt in "bcd"))
        assert [out["text"] for out in outs] == [expected_text(prompt, 6) for prompt in "bcd"]
        assert (await task)["text"] == expected_text("a", 6)

    async def test_two_tasks_may_await_one_generation(self, world: World) -> None:
        generation = world.engine.async_generate("a", GREEDY)
        first, second = asyncio.create_task(generation), asyncio.create_task(generation)
        assert await first is await second

    async def test_generation_works_with_wait_for_timeout_and_shield(self, world: World) -> None:
        assert (await asyncio.wait_for(world.engine.async_generate("a", GREEDY), 30))["text"] == expected_text("a", 6)
        async with asyncio.timeout(30):
            await asyncio.shield(world.engine.async_generate("a", GREEDY))

    async def test_generation_works_in_a_task_group(self, world: World) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(world.engine.async_generate(prompt, GREEDY)) for prompt in "abc"]
        assert [task.result()["text"] for task in tasks] == [expected_text(prompt, 6) for prompt in "abc"]

    async def test_stream_works_in_an_anyio_task_group(self, world: World) -> None:
        texts: list[str] = []

        async def read(prompt: str) -> None:
            async for chunk in world.engine.async_generate(prompt, GREEDY, stream=True):
                texts.append(chunk["text"])  # noqa: PERF401  # the scope must be left between chunks

        async with anyio.create_task_group() as group:
            for prompt in "abc":
                group.start_soon(read, prompt)
        assert sorted("".join(texts)) == sorted("".join(expected_text(prompt, 6) for prompt in "abc"))

    async def test_task_of_a_stream_returns_the_stream(self, world: World) -> None:
        stream = await asyncio.create_task(world.engine.async_generate("a", GREEDY, stream=True))
        assert "".join([chunk["text"] async for chunk in stream]) == expected_text("a", 6)
