"""The engine for users' tests: the real scheduler, detokenizer and frontend with given answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aioengine.api.params import SamplingParams
from aioengine.errors import EngineDeadError, EngineStartupError, RequestError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from aioengine.testing.fake_runner import HIDDEN_SIZE
from aioengine.testing.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.one_loop

ANSWERS = {"France": "Paris. 🥖", "capital of": "I do not know that one.", "": "Hm."}


class TestAnswers:
    async def test_longest_key_in_the_prompt_selects_the_answer(self) -> None:
        async with fake_async_engine(ANSWERS) as engine:
            outs = await engine.async_generate(["the capital of France", "the capital of Peru", "x"])
            assert outs["text"] == ["I do not know that one.", "I do not know that one.", "Hm."]
            assert (await engine.async_generate("France"))["text"] == "Paris. 🥖"
            assert outs["meta_info"]["finish_reason"] == ["stop"] * 3

    async def test_stream_joins_to_the_answer_in_complete_characters(self) -> None:
        async with fake_async_engine(ANSWERS) as engine:
            texts = [chunk["text"] async for chunk in engine.async_generate("France", stream=True)]
            assert "".join(texts) == "Paris. 🥖"
            assert "🥖" in texts
            assert len(texts) > 4

    async def test_stop_strings_and_lengths(self) -> None:
        async with fake_async_engine({"": "one two three"}) as engine:
            out = await engine.async_generate("x", {"stop": " th"})
            assert (out["text"], out["meta_info"]["finish_reason"]["matched"]) == ("one two", " th")
            assert (await engine.async_generate("x", {"max_new_tokens": 5}))["text"] == "one t"

    @pytest.mark.parametrize("made", [dict, SamplingParams])
    async def test_changing_arguments_after_the_call_has_no_effect(self, made: Callable[..., SamplingParams]) -> None:
        stop, ids, biases = [" th"], [3], {3: 0.0}
        params = made(stop=stop, stop_token_ids=ids, logit_bias=biases, max_new_tokens=12)
        async with fake_async_engine({"": "one two three"}) as engine, asyncio.timeout(30):
            first = engine.async_generate("x", params)
            other = engine.async_generate("x", {"max_new_tokens": 5})
            stop[0], ids[0], biases[10**9] = "one", 10**9, 0.0
            assert (await first)["text"] == "one two"
            assert (await other)["text"] == "one t"
            if isinstance(params, SamplingParams):  # the engine has copies
                assert (await engine.async_generate("x", params))["text"] == "one two"
            else:
                with pytest.raises(ValueError, match="1000000000"):
                    engine.async_generate("x", params)

    async def test_chat_is_answered(self) -> None:
        async with fake_async_engine({"hi": "hello"}) as engine:
            assert (await engine.async_chat([{"role": "user", "content": "hi"}]))["text"] == "hello"

    async def test_without_answers_the_output_depends_on_the_prompt(self) -> None:
        async with fake_async_engine(random_seed=3) as engine:
            first = await engine.async_generate("a", {"max_new_tokens": 20, "temperature": 0})
            again = await engine.async_generate("a", {"max_new_tokens": 20, "temperature": 0})
            other = await engine.async_generate("b", {"max_new_tokens": 20, "temperature": 0})
            assert first["text"] == again["text"] != other["text"]
            assert len(first["text"]) == 20

    def test_synchronous_engine(self) -> None:
        with fake_engine(ANSWERS) as engine:
            assert engine.generate("France")["text"] == "Paris. 🥖"
            assert "".join(chunk["text"] for chunk in engine.generate("France", stream=True)) == "Paris. 🥖"

    def test_unknown_setup_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match="wrong arguments of a fake engine: Object contains unknown field `answer`"
        ):
            fake_engine(answer="x")

    @pytest.mark.parametrize(
        ("setup", "message"),
        [
            ({"answers": 3}, r"got `int` - at `\$.answers`"),
            ({"answers": {1: "a"}}, r"Expected `str`, got `int` - at `key` in `\$.answers`"),
            ({"num_pages": "many"}, r"Expected `int`, got `str` - at `\$.num_pages`"),
            ({"num_pages": 0}, r"Expected `int` >= 1 - at `\$.num_pages`"),
            ({"faults": "kill"}, r"got `str` - at `\$.faults`"),
            ({"slow_reader": "wait"}, "Invalid enum value 'wait'"),
            ({"tenant_weights": {"gold": 0}}, r"Expected `float` > 0.0 - at `\$.tenant_weights"),
            ({"step_time_s": -1}, r"Expected `float` >= 0.0 - at `\$.step_time_s`"),
            ({"processes": 1}, r"got `int` - at `\$.processes`"),
        ],
    )
    def test_wrong_setup_is_refused(self, setup: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fake_async_engine(**setup)  # type: ignore[arg-type]


class TestUnderLoad:
    async def test_many_streams_at_once_with_cancellation(self) -> None:
        """Requests exceed the capacity: they are queued, preempted and share prefixes. All answers are correct."""
        async with fake_async_engine({"": "the answer " * 10}, num_pages=64, max_running=8) as engine:

            async def read(number: int) -> str:
                text = ""
                async for chunk in engine.async_generate(f"prompt {number % 7}", {"max_new_tokens": 90}, stream=True):
                    text += chunk["text"]
                    if number % 5 == 0 and len(text) > 10:
                        break
                return text

            texts = await asyncio.gather(*(read(number) for number in range(40)))
            assert all(("the answer " * 10).startswith(text) for text in texts)
            assert all(len(text) == 90 for number, text in enumerate(texts) if number % 5)
            assert await engine.drain(5)
            stats = engine.stats()
            assert stats["num_streams"] == 0

    async def test_chunks_report_prefix_hits_and_preemptions(self) -> None:
        """All chunks have the same prefix hit. The number of preemptions never decreases."""
        async with fake_async_engine({"": "x" * 200}, num_pages=40, max_running=8) as engine:

            async def read() -> list[tuple[int, int]]:
                params = {"max_new_tokens": 150}
                stream = engine.async_generate("the same prompt, longer than a page", params, stream=True)
                infos = [chunk["meta_info"] async for chunk in stream]
                return [(info["cached_tokens"], info["num_preemptions"]) for info in infos]

            readings = await asyncio.gather(*(read() for _ in range(8)))
            assert all(len({num_cached for num_cached, _ in reading}) == 1 for reading in readings)
            assert any(reading[0][0] > 0 for reading in readings)
            counts = [[count for _, count in reading] for reading in readings]
            assert all(counts_of_stream == sorted(counts_of_stream) for counts_of_stream in counts)
            assert any(counts_of_stream[-2] > 0 for counts_of_stream in counts)

    async def test_priorities(self) -> None:
        async with fake_async_engine({"": "x" * 20}, max_running=1) as engine:
            order: list[str] = []

            async def call(name: str, priority: int) -> None:
                await engine.async_generate(name, priority=priority)
                order.append(name)

            await asyncio.gather(call("first", 0), call("low", -1), call("high", 5), call("middle", 1))
            assert order.index("high") < order.index("middle") < order.index("low")

    async def test_deadline(self) -> None:
        async with fake_async_engine(num_pages=64) as engine:
            out = await engine.async_generate("p", {"max_new_tokens": 900}, timeout=0.02)
            assert out["meta_info"]["finish_reason"] == "deadline"
            assert 0 < len(out["text"]) < 900


class TestVectors:
    """Vectors and hidden states have the shapes of a real model."""

    @pytest.mark.parametrize("answers", [None, ANSWERS])
    async def test_vectors(self, answers: dict[str, str] | None) -> None:
        async with fake_async_engine(answers) as engine:
            first, same, other = await engine.async_encode(["a", "a", "b"], normalize=False)
            assert first["embedding"].shape == (HIDDEN_SIZE,)
            assert np.array_equal(first["embedding"], same["embedding"])
            assert not np.array_equal(first["embedding"], other["embedding"])
            cut = await engine.async_encode("a", dimensions=3)
            assert np.linalg.norm(cut["embedding"]) == pytest.approx(1)

    @pytest.mark.parametrize("answers", [None, ANSWERS])
    async def test_hidden_states(self, answers: dict[str, str] | None) -> None:
        async with fake_async_engine(answers) as engine:
            params = {"max_new_tokens": 3}
            out = await engine.async_generate("France", params, return_hidden_states=True)
            states = out["meta_info"].get("hidden_states", [])
            num_prompt = out["meta_info"]["prompt_tokens"]
            assert [state.shape for state in states] == [(num_prompt, HIDDEN_SIZE), (HIDDEN_SIZE,), (HIDDEN_SIZE,)]
            last = await engine.async_generate("France", params, return_hidden_states="last")
            assert np.array_equal(last["meta_info"].get("hidden_states", []), states[-1:])


class TestFaults:
    async def test_one_row_fails_alone(self) -> None:
        async with fake_async_engine({"": "fine"}, faults=Faults(fail_row_at=1)) as engine:
            results = await asyncio.gather(*(engine.async_generate("p") for _ in range(3)), return_exceptions=True)
            assert sorted(type(result).__name__ for result in results) == ["RequestError", "dict", "dict"]
            with pytest.raises(RequestError):
                raise next(result for result in results if isinstance(result, Exception))

    @pytest.mark.process
    async def test_a_killed_process_is_an_error_everywhere(self) -> None:
        async with fake_async_engine({"": "x" * 100}, faults=Faults(kill_at=5), max_restarts=0) as engine:
            stream = engine.async_generate("p", stream=True)
            with pytest.raises(EngineDeadError, match="signal 9"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError):
                engine.async_generate("p")
            assert not engine.is_alive

    async def test_failed_start_is_an_error(self) -> None:
        engine = fake_async_engine(faults=Faults(start_error="the disk is on fire"))
        with pytest.raises(EngineStartupError, match="the disk is on fire"):
            await engine.start()

    def test_an_engine_without_processes_has_no_children(self) -> None:
        with fake_engine(ANSWERS) as engine:
            assert engine.get_all_child_pids() == []

    @pytest.mark.process
    def test_synchronous_engine_can_have_real_processes(self) -> None:
        with fake_engine(ANSWERS, processes=True) as engine:
            assert engine.generate("France")["text"] == "Paris. 🥖"
            assert len(engine.get_all_child_pids()) == 2
        assert engine.get_all_child_pids() == []
