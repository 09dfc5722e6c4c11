"""Refused calls, failed rows, deadlines, overload, and the death of the engine."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.api.params import SamplingParams
from aioengine.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineOverloadedError,
    EngineStalledError,
    RequestError,
    RequestTooLargeError,
    UnknownParameterError,
)
from aioengine.frontend.intake.submitter import MAX_ROWS_AT_ONCE
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import FinishCode, FirstToken, Reply, Stats, TextChunks
from aioengine.settings.config import QueueConfig
from tests.engine.engine_double import CONTEXT_LENGTH, VOCAB_SIZE, World, expected_text
from tests.kit.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 400}

WRONG_CALLS: list[tuple[dict[str, object], type[Exception], str]] = [
    ({}, ValueError, "both missing"),
    ({"prompt": "a", "input_ids": [1]}, ValueError, "both given"),
    ({"prompt": ""}, ValueError, "prompt is empty"),
    ({"prompt": ["a", ""]}, ValueError, r"prompt\[1\] is empty"),
    ({"prompt": 5}, TypeError, "prompt must be a string or a list of strings, got 5"),
    ({"prompt": ["a", b"b"]}, TypeError, r"prompt\[1\] must be a string, got b'b'"),
    ({"prompt": [1, 2]}, TypeError, "token ids are given as input_ids"),
    ({"prompt": ["a", "\ud83d"]}, ValueError, r"prompt\[1\] has a lone surrogate"),
    ({"prompt": b"bytes"}, TypeError, "prompt"),
    ({"prompt": "half \ud83d"}, ValueError, "lone surrogate at position 5"),
    ({"input_ids": []}, ValueError, "input_ids is empty"),
    ({"input_ids": [[1], []]}, ValueError, r"input_ids\[1\] is empty"),
    ({"input_ids": [1, VOCAB_SIZE]}, ValueError, f"has {VOCAB_SIZE}, outside the vocabulary; ids go from 0 to"),
    ({"input_ids": [1, -1]}, ValueError, "-1, outside the vocabulary"),
    ({"input_ids": [1, True]}, TypeError, "True"),
    ({"input_ids": [1, 2.0]}, TypeError, "2.0"),
    ({"input_ids": [1, math.nan]}, TypeError, "nan"),
    ({"input_ids": [[1], 2]}, TypeError, "input_ids"),
    ({"input_ids": "12"}, TypeError, "input_ids must be a list of token ids"),
    ({"prompt": "a", "sampling_params": {"temprature": 1}}, UnknownParameterError, "did you mean 'temperature'"),
    ({"prompt": "a", "sampling_params": {"temperature": math.nan}}, ValueError, "temperature"),
    ({"prompt": "a", "sampling_params": {"max_new_tokens": -1}}, ValueError, "max_new_tokens"),
    ({"prompt": "a", "sampling_params": [{}]}, TypeError, "one prompt"),
    ({"prompt": ["a", "b"], "sampling_params": [{}]}, ValueError, "1 entry for 2 prompts"),
    ({"prompt": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, ValueError, "n must be the same"),
    ({"prompt": "a", "sampling_params": {"logit_bias": {VOCAB_SIZE: 1.0}}}, ValueError, "logit_bias"),
    ({"prompt": "a", "sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}, ValueError, "stop_token_ids"),
    ({"prompt": "a", "rid": ""}, ValueError, "rid is empty"),
    ({"prompt": "a", "rid": 5}, TypeError, "rid"),
    ({"prompt": "a", "rid": ["x"]}, TypeError, "one prompt"),
    ({"prompt": ["a", "b"], "rid": ["x"]}, ValueError, "1 entry for 2 prompts"),
    ({"prompt": ["a", "b"], "rid": ["x", "x"]}, ValueError, "two prompts"),
    ({"prompt": "a", "timeout": 0}, ValueError, "timeout"),
    ({"prompt": "a", "timeout": math.nan}, ValueError, "timeout"),
    ({"prompt": "a", "queue_timeout": -1.0}, ValueError, "queue_timeout"),
    ({"prompt": "a", "first_token_timeout": "1"}, TypeError, "first_token_timeout"),
    ({"prompt": "a", "priority": 0.5}, TypeError, "priority"),
    ({"prompt": "a", "stream": 1}, TypeError, "stream"),
    ({"prompt": "a", "return_exceptions": None}, TypeError, "return_exceptions"),
    ({"prompt": "a", "image_data": "x.png"}, ValueError, "image_data is given, and this model accepts only text"),
    ({"prompt": ["a"], "image_data": [None, "x.png"]}, ValueError, "image_data has 2 entries for 1 prompt;"),
    ({"prompt": "a", "return_routed_experts": 0}, ValueError, "only False or None is accepted"),
    ({"prompt": "a", "return_logprobs": False}, TypeError, "did you mean 'return_logprob'"),
    ({"prompts": ["a"]}, TypeError, r"unexpected argument 'prompts' \(did you mean 'prompt'\?\); allowed: prompt, "),
    ({"prompt": 5, "sampling_parms": {}}, TypeError, "did you mean 'sampling_params'"),
    ({"input_ids": np.array([1.0, 2.0])}, TypeError, "input_ids entries must be an integer.* got 1.0 of type float"),
    ({"input_ids": np.array(5)}, TypeError, "input_ids must be a list of token ids"),
    ({"input_ids": [np.array([1, 2]), 5]}, TypeError, "input_ids.* must be a list of token ids, got 5"),
    ({"input_ids": [torch.tensor(1.5)]}, TypeError, "must be an integer of at least 0, got 1.5 of type float"),
    ({"input_ids": [torch.tensor(True)]}, TypeError, "must be an integer of at least 0, got True of type bool"),
    ({"input_ids": torch.zeros(0)}, ValueError, "input_ids is empty"),
    ({"input_ids": {1, 2}}, TypeError, "input_ids must be a list of token ids.* of type set"),
    (
        {"prompt": np.array([1, 2])},
        TypeError,
        r"prompt\[0\] must be a string \(token ids are given as input_ids",
    ),
    ({"prompt": "a", "temperature": 0}, TypeError, "'temperature': it belongs in sampling_params"),
    ({"prompt": "a", "max_tokens": 5}, TypeError, "'max_tokens': it belongs in sampling_params"),
    ({"prompt": "a", "timeouts": 1}, TypeError, "did you mean 'timeout'"),
]


@pytest.mark.one_loop
@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_CALLS)
async def test_wrong_arguments_raise_at_the_call(
    world: World, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        world.engine.async_generate(**arguments)  # type: ignore[call-overload]
    assert isinstance(caught.value, ValueError | TypeError)
    assert world.double.submits == []
    assert world.engine.stats()["num_streams"] == 0


async def test_missing_features_may_be_disabled(world: World) -> None:
    off = {
        "image_data": None, "lora_path": [None], "return_hidden_states": False, "session_params": None,
    }  # fmt: skip
    params = {"max_new_tokens": 2, "json_schema": None, "regex": None, "custom_params": {}}
    out = await world.engine.async_generate(["a"], params, **off)  # type: ignore[call-overload]
    assert out[0]["meta_info"]["completion_tokens"] == 2


async def test_ids_may_be_integers_of_any_type(world: World) -> None:
    mixed = [np.int64(1), torch.tensor(2), np.array(3)]
    for ids in (mixed, np.array([1, 2, 3], dtype=np.int32), torch.arange(1, 4), array("q", [1, 2, 3])):
        out = await world.engine.async_generate(input_ids=ids, return_prompt_token_ids=True)  # type: ignore[call-overload]
        assert out["prompt_token_ids"] == [1, 2, 3]
    rows = [[1, 2], [3, 4]]
    for batch in (
        np.array(rows),
        torch.tensor(rows),
        [np.array(row) for row in rows],
        (torch.tensor(rows[0]), rows[1]),
    ):
        outs = await world.engine.async_generate(input_ids=batch, return_prompt_token_ids=True)  # type: ignore[call-overload]
        assert outs["prompt_token_ids"] == rows


async def test_drawn_seeds_can_be_sent_back_by_a_browser(world: World) -> None:
    outs = await world.engine.async_generate(["a"] * 50, {"max_new_tokens": 1, "n": 4})
    seeds = outs["meta_info"]["seed"]
    assert max(seeds) < 2**53
    assert len(set(seeds)) == 200
    assert max(seeds) > 2**50


@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "messages is empty"),
        ("hi", TypeError, "messages must be a list"),
        (["hi"], TypeError, r"messages\[0\]"),
        ([{"content": "hi"}], ValueError, r"messages\[0\] has no role"),
        ([{"role": 5, "content": "hi"}], TypeError, r"the role of messages\[0\] must be a string, got 5"),
        ([{"role": "user"}], ValueError, r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], ValueError, r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], TypeError, r"the content of messages\[0\] must be a string or a list"),
        ([{"role": "user", "content": "\ud800"}], ValueError, r"the content of messages\[0\] must be text that UTF-8"),
        ([{"role": "user", "content": ["hi"]}], TypeError, r"part 0 of messages\[0\] must be a dict"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "audio"}]}],
            ValueError,
            r"part 1 of messages\[0\] is of type 'audio'; allowed: text, image, image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            TypeError,
            r"the text of part 0 of messages\[0\] must be a",
        ),
        ([[{"role": "user", "content": "hi"}], []], ValueError, r"messages\[1\] is empty"),
    ],
)
async def test_wrong_messages_are_refused(world: World, messages: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        world.engine.async_chat(messages)  # type: ignore[call-overload]


class TestWrongRows:
    """With ``return_exceptions=True``, an invalid row returns its error, and the other rows return answers."""

    async def test_texts(self, world: World) -> None:
        prompts = ["a", "", "b", 5, "x" * 600]
        outs = await world.engine.async_generate(prompts, GREEDY, return_exceptions=True)  # type: ignore[call-overload]
        assert [outs[0]["text"], outs[2]["text"]] == [expected_text("a", 6), expected_text("b", 6)]
        assert [type(outs[place]) for place in (1, 3, 4)] == [ValueError, TypeError, RequestTooLargeError]
        assert "prompt[1] is empty" in str(outs[1])
        assert "prompt[3] must be a string" in str(outs[3])
        with pytest.raises(ValueError, match=r"prompt\[1\] is empty"):
            world.engine.async_generate(prompts, GREEDY)  # type: ignore[call-overload]

    async def test_ids(self, world: World) -> None:
        rows = [None, [97], [VOCAB_SIZE], [], [98, "x"]]
        outs = await world.engine.async_generate(None, GREEDY, input_ids=rows, return_exceptions=True)  # type: ignore[call-overload]
        assert outs[1]["text"] == expected_text("a", 6)
        words = [
            "input_ids[0] must be a list",
            "outside the vocabulary",
            "input_ids[3] is empty",
            "input_ids[4] entries",
        ]
        assert [word in str(outs[place]) for word, place in zip(words, (0, 2, 3, 4), strict=True)] == [True] * 4

    async def test_conversations(self, world: World) -> None:
        rows = [[{"role": "user", "content": "hi"}], [{"role": "user"}], []]
        outs = await world.engine.async_chat(rows, GREEDY, return_exceptions=True)
        assert outs[0]["text"] == expected_text("<user>hi<assistant>", 6)
        assert "messages[1][0] has no content" in str(outs[1])
        assert "messages[2] is empty" in str(outs[2])

    async def test_sampling_parameters_of_rows(self, world: World) -> None:
        wrong = [{"temperature": 9}, {"temprature": 1}, {"logit_bias": {VOCAB_SIZE: 1.0}}]
        params = [wrong[0], {**GREEDY, "n": 2}, wrong[1], {**wrong[2], "n": 2}]
        outs = await world.engine.async_generate(list("abcd"), params, return_exceptions=True)
        names = [type(out).__name__ for out in outs]
        assert names == [*["ValueError"] * 2, *["dict"] * 2, *["UnknownParameterError"] * 2, *["ValueError"] * 2]
        assert outs[2]["text"] == outs[3]["text"] == expected_text("b", 6)

    @pytest.mark.one_loop
    @pytest.mark.parametrize("wrong", ["x" * 100_000, ["x"] * 100_000, {"x": 0} | dict.fromkeys(range(100_000), 1)])
    async def test_sampling_parameters_of_rows_of_any_size(self, world: World, wrong: object) -> None:
        every: list[Any] = [{name: wrong} for name in SamplingParams.__table__.fields]
        for params in (every[::3], every[1::3], every[2::3]):  # the constraints of all rows are too large together
            rows = [*params, GREEDY]
            outs = await world.engine.async_generate(["b"] * len(rows), rows, return_exceptions=True)
            for out in outs[:-1]:
                assert isinstance(out, ValueError | TypeError)
                assert len(str(out)) < 1000
            assert outs[-1]["text"] == expected_text("b", 6)

    async def test_all_rows_may_be_invalid(self, world: World) -> None:
        outs = await world.engine.async_generate(["", ""], return_exceptions=True)
        assert [str(out) for out in outs] == [f"prompt[{place}] is empty; give at least one character, or input_ids"
                                              for place in range(2)]  # fmt: skip
        assert world.double.submits == []
        assert world.engine.stats()["num_streams"] == 0

    async def test_stream_has_the_error_in_the_last_chunk_of_the_row(self, world: World) -> None:
        stream = world.engine.async_generate(["", "a"], GREEDY, stream=True, return_exceptions=True)
        chunks = [chunk async for chunk in stream]
        reason = next(chunk["meta_info"]["finish_reason"] for chunk in chunks if chunk["index"] == 0)
        assert reason == "abort"
        assert "prompt[0] is empty" in str(reason["message"])
        assert "".join(chunk["text"] for chunk in chunks if chunk["index"] == 1) == expected_text("a", 6)

    @pytest.mark.one_loop
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompt": ""}, "prompt is empty"),
            ({"prompt": ["a", ""], "sampling_params": {"temperature": 9}}, "temperature"),
            ({"prompt": ["a", ""], "sampling_params": {"logit_bias": {VOCAB_SIZE: 1.0}}}, "logit_bias"),
            ({"prompt": ["a", ""], "sampling_params": [None]}, "1 entry for 2 prompts"),
            ({"prompt": ["a", ""], "rid": ["x"]}, "1 entry for 2 prompts"),
            ({"prompt": ["a", ""], "temprature": 1}, "unexpected argument 'temprature'"),
        ],
    )
    async def test_errors_of_the_whole_call_are_raised(
        self, world: World, arguments: dict[str, object], message: str
    ) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            world.engine.async_generate(**arguments, return_exceptions=True)  # type: ignore[call-overload]


async def test_empty_batch_may_have_an_empty_list_of_parameters(world: World) -> None:
    assert await world.engine.async_generate([], []) == []


class TestAtTheFirstAwait:
    async def test_prompt_that_is_too_long_is_refused(self, world: World) -> None:
        generation = world.engine.async_generate("x" * CONTEXT_LENGTH)
        with pytest.raises(RequestTooLargeError, match=f"{CONTEXT_LENGTH} tokens"):
            await generation
        with pytest.raises(RequestTooLargeError):
            await generation
        stream = world.engine.async_generate("x" * CONTEXT_LENGTH, stream=True)
        with pytest.raises(RequestTooLargeError):
            await stream
        with pytest.raises(RequestTooLargeError):
            await anext(stream)
        assert world.double.submits == []

    async def test_explicit_length_that_is_too_long_is_refused(self, world: World) -> None:
        with pytest.raises(RequestTooLargeError, match="max_new_tokens=500"):
            await world.engine.async_generate("x" * 100, {"max_new_tokens": 500})
        assert world.double.submits == []

    async def test_default_length_is_limited_to_the_context(self, world: World) -> None:
        await world.engine.async_generate("x" * 500)
        await world.engine.async_generate("x" * 500, {"max_new_tokens": None})
        await world.engine.async_generate("x")
        await world.engine.async_generate("x", {"max_new_tokens": None})
        assert [submit.limits.max_new_tokens for submit in world.double.submits] == [12, 12, 128, CONTEXT_LENGTH - 1]

    async def test_request_without_new_tokens_ends_at_once(self, world: World) -> None:
        out = await world.engine.async_generate("x", {"max_new_tokens": 0})
        assert (out["text"], out["output_ids"]) == ("", [])
        assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert world.double.submits == []

    async def test_error_of_a_chat_template_is_raised(self, world: World) -> None:
        with pytest.raises(ValueError, match="^unknown role"):
            await world.engine.async_chat([{"role": "nobody", "content": "hi"}])

    async def test_a_text_that_breaks_the_tokenizer_fails_alone(self, world: World) -> None:
        good, bad = world.engine.async_generate("a", GREEDY), world.engine.async_generate("\x00unencodable", GREEDY)
        with pytest.raises(RequestError, match="breaks the tokenizer") as caught:
            await bad
        assert caught.value.stage == "tokenize"
        assert (await good)["text"] == expected_text("a", 6)


class TestRowsThatFail:
    async def test_one_request_fails_alone(self, world: World) -> None:
        bad = world.engine.async_generate("bad", LONG, stream=True)
        good = world.engine.async_generate("good", GREEDY)
        text = (await anext(bad))["text"]
        world.double.end([0], FinishCode.FAILED, "the row broke")

        async def read() -> str:
            return "".join([chunk["text"] async for chunk in bad])

        with pytest.raises(RequestError, match="'forward': the row broke"):
            await read()
        assert text
        assert (await good)["text"] == expected_text("good", 6)

    async def test_request_refused_by_the_scheduler_raises(self, world: World) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate("a", LONG)
        await until(lambda: bool(world.double.live))
        world.double.end([0], FinishCode.TOO_LARGE, "25 pages, and there are 20")
        with pytest.raises(RequestTooLargeError, match="25 pages"):
            await generation

    async def test_a_failing_row_ends_its_batch(self, world: World) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate(["a", "b", "c"], LONG)
        await until(lambda: len(world.double.live) == 3)
        world.double.end([1], FinishCode.FAILED, "broke")
        with pytest.raises(RequestError, match="broke"):
            await generation
        assert [uid for abort in world.double.aborts for uid in abort.uids] == [0, 2]
        assert world.engine.stats()["num_streams"] == 0

    async def test_batch_returns_exceptions_in_place_of_answers(self, world: World) -> None:
        prompts = ["a", "x" * CONTEXT_LENGTH, "b"]
        outs = await world.engine.async_generate(prompts, GREEDY, return_exceptions=True)
        assert isinstance(outs[1], RequestTooLargeError)
        assert [outs[0]["text"], outs[2]["text"]] == [expected_text("a", 6), expected_text("b", 6)]
        assert outs["text"] == [outs[0]["text"], outs[1], outs[2]["text"]]

    async def test_stream_returns_exceptions_in_place_of_rows(self, world: World) -> None:
        texts, reasons = ["", "", ""], [""] * 3
        prompts = ["a", "x" * CONTEXT_LENGTH, "b"]
        async for chunk in world.engine.async_generate(prompts, GREEDY, stream=True, return_exceptions=True):
            texts[chunk["index"]] += chunk["text"]
            reason = chunk["meta_info"]["finish_reason"]
            if reason is not None:
                reasons[chunk["index"]] = str(reason.get("err_type", reason["type"]))
        assert texts == [expected_text("a", 6), "", expected_text("b", 6)]
        assert reasons == ["length", "RequestTooLargeError", "length"]


class TestIds:
    async def test_id_of_an_open_call_is_refused(self, world: World) -> None:
        generation = world.engine.async_generate("a", GREEDY, rid="x")
        with pytest.raises(ValueError, match="'x' is in use"):
            world.engine.async_generate("b", GREEDY, rid="x")
        await generation
        assert (await world.engine.async_generate("b", GREEDY, rid="x"))["meta_info"]["id"] == "x"

    async def test_id_is_free_after_leaving(self, world: World) -> None:
        stream = world.engine.async_generate("a", LONG, rid="x", stream=True)
        await anext(stream)
        await stream.aclose()
        await world.engine.async_generate("b", GREEDY, rid="x")

    async def test_id_is_free_at_once_after_a_break(self, world: World) -> None:
        for _ in range(2):
            async for _ in world.engine.async_generate(["a", "b"], LONG, rid="x", stream=True):
                break
        again = world.engine.async_generate("c", LONG, rid="x", stream=True)
        await anext(again)
        world.engine.abort_request("x")  # the id belongs to the new call
        assert [chunk["meta_info"]["finish_reason"] async for chunk in again][-1] == "abort"

    async def test_id_stays_in_use_while_the_stream_can_be_attached_to(self, world: World) -> None:
        async for _ in world.engine.async_generate("a", LONG, rid="x", stream=True, resume_ttl=9):
            break
        with pytest.raises(ValueError, match="'x' is in use by a request that runs or can be attached to"):
            world.engine.async_generate("b", GREEDY, rid="x")

    @pytest.mark.parametrize("other", ["x", "x_0", "x_2", "x_2_1"])
    async def test_row_ids_of_an_open_call_are_in_use(self, world: World, other: str) -> None:
        batch = world.engine.async_generate(["a", "b", "c"], {**GREEDY, "n": 2}, rid="x")
        with pytest.raises(ValueError, match=f"'{other}' is in use"):
            world.engine.async_generate("d", GREEDY, rid=other)
        await batch

    async def test_each_prompt_may_have_an_id(self, world: World) -> None:
        batch = world.engine.async_generate(["a", "b"], GREEDY, rid=["first", "second"])
        with pytest.raises(ValueError, match="'second' is in use"):
            world.engine.async_generate("d", GREEDY, rid="second")
        assert (await batch)["meta_info"]["id"] == ["first", "second"]


class TestDeadlines:
    async def test_deadlines_are_sent_as_absolute_times(self, world: World) -> None:
        before = time.monotonic()
        await world.engine.async_generate("a", GREEDY, timeout=10, queue_timeout=20, first_token_timeout=30.5)
        deadlines = world.double.submits[0].limits.deadlines
        total = deadlines["total"]
        assert before + 10 <= total <= time.monotonic() + 10
        assert deadlines == pytest.approx({"total": total, "queue": total + 10, "first_token": total + 20.5})

    async def test_expired_request_has_a_finish_reason(self, world: World) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate("a", LONG, timeout=5)
        await until(lambda: bool(world.double.live))
        world.double.end([0], FinishCode.DEADLINE)
        assert (await generation)["meta_info"]["finish_reason"] == "deadline"

    async def test_frontend_ends_requests_if_the_scheduler_does_not_answer(self, world: World) -> None:
        world.double.is_held = world.double.ignores_aborts_and_controls = True
        begun_at = time.monotonic()
        out = await world.engine.async_generate("a", LONG, timeout=0.05)
        assert time.monotonic() - begun_at > 0.05
        assert out["meta_info"]["finish_reason"] == {"type": "deadline", "which": "total"}
        assert [(abort.uids, abort.code) for abort in world.double.aborts] == [([0], FinishCode.DEADLINE)]

    @pytest.mark.parametrize("which", ["queue", "first_token"])
    async def test_frontend_ends_requests_that_have_not_started(self, world: World, which: str) -> None:
        world.double.is_held = world.double.ignores_aborts_and_controls = True
        begun_at = time.monotonic()
        batch = world.engine.async_generate(["a"] * 2, LONG, **{f"{which}_timeout": 0.05})  # type: ignore[arg-type]
        await until(lambda: len(world.double.live) == 2)
        world.double.in_flight = {1}  # admitted, without a token
        opened = TextChunks(TokenColumns(), [], [], 2, [FirstToken(0, 0, begun_at, begun_at)])
        if which == "first_token":
            world.double.events.on_messages([opened])
        await until(lambda: bool(world.double.aborts))
        assert time.monotonic() - begun_at > 0.5
        late = 0 if which == "queue" else 1
        assert [(abort.uids, abort.code) for abort in world.double.aborts] == [([late], FinishCode.DEADLINE)]
        world.double.ignores_aborts_and_controls = False
        world.engine.abort_request(abort_all=True)
        reasons = [out["meta_info"]["finish_reason"] for out in await batch]
        assert reasons[late] == {"type": "deadline", "which": which}
        assert reasons[1 - late] == "abort"

    async def test_frontend_does_not_expire_queued_requests_while_the_scheduler_ends_steps(self, world: World) -> None:
        world.double.is_held = world.double.ignores_aborts_and_controls = True
        waiting = world.engine.async_generate("a", LONG, queue_timeout=0.05)
        await until(lambda: bool(world.double.live))
        now = time.monotonic()
        world.double.events.on_messages([Stats(num_steps=1, sent_at=now, step_ended_at=now, num_waiting=1)])
        await asyncio.sleep(0.7)
        assert world.double.aborts == []
        await waiting.aclose()

    @pytest.mark.parametrize("which", ["timeout", "queue_timeout", "first_token_timeout"])
    async def test_rows_that_wait_in_the_frontend_expire(self, which: str) -> None:
        here = World(max_running=1)
        async with here.engine as engine:
            here.double.is_held = here.double.ignores_aborts_and_controls = True
            stream = engine.async_generate(["a"] * 4, LONG, stream=True, **{which: 0.05})
            reasons = {}
            while len(reasons) < 2:
                chunk = await anext(stream)
                reasons[chunk["index"]] = chunk["meta_info"]["finish_reason"]
            expected = {"type": "deadline", "which": which.removesuffix("timeout").rstrip("_") or "total"}
            assert reasons == {2: expected, 3: expected}
            await stream.aclose()

    async def test_request_can_expire_while_it_is_tokenized(self, world: World) -> None:
        world.tokenizer.held_text = "a"
        out = await world.engine.async_generate("a", LONG, timeout=0.02)
        assert out["meta_info"]["finish_reason"] == "deadline"
        world.tokenizer.is_released.set()
        await world.engine.async_generate("b", GREEDY)
        assert [submit.prompt_token_ids for submit in world.double.submits] == [[ord("b")]]


class TestOverload:
    async def test_call_beyond_the_limit_is_refused(self) -> None:
        here = World(max_running=2, queue=QueueConfig(max_requests=3, max_tokens=10**6))
        async with here.engine as engine:
            here.double.is_held = True
            taken = [engine.async_generate("a", GREEDY) for _ in range(5)]
            with pytest.raises(EngineOverloadedError, match="max_queued_requests=3") as caught:
                engine.async_generate("a", GREEDY)
            assert 0 < caught.value.retry_after <= 60
            assert caught.value.status_code == 503
            await until(lambda: len(here.double.live) == 5)
            here.double.resume()
            await asyncio.gather(*taken)
            await engine.async_generate("a", GREEDY)

    async def test_queued_tokens_are_limited(self) -> None:
        here = World(max_running=2, queue=QueueConfig(max_requests=1000, max_tokens=500))
        async with here.engine as engine:
            here.double.is_held = True
            taken = [engine.async_generate(input_ids=[1] * 500, sampling_params={"max_new_tokens": 1}) for _ in "abcd"]
            with pytest.raises(EngineOverloadedError, match="max_queued_tokens=500"):
                engine.async_generate("a", GREEDY)
            here.double.resume()
            await asyncio.gather(*taken)
            await engine.async_generate("a", GREEDY)

    async def test_leaving_frees_capacity(self) -> None:
        here = World(max_running=1, queue=QueueConfig(max_requests=0, max_tokens=10**6))
        async with here.engine as engine:
            here.double.is_held = True
            stream = engine.async_generate("a", GREEDY, stream=True)
            with pytest.raises(EngineOverloadedError):
                engine.async_generate("a", GREEDY)
            await stream.aclose()
            here.double.resume()
            await engine.async_generate("a", GREEDY)


class TestDeath:
    async def test_every_waiting_and_later_call_gets_the_error(self, world: World) -> None:
        world.double.is_held = True
        stream = await world.engine.async_generate("a", LONG, stream=True)
        waiting = [
            asyncio.ensure_future(world.engine.async_generate("b", LONG)),
            asyncio.ensure_future(anext(stream)),
            asyncio.ensure_future(world.engine.async_generate(["c", "d"], LONG)),
        ]
        failed = asyncio.create_task(world.engine.wait_failed())
        await until(lambda: len(world.double.live) == 4)
        error = EngineDeadError("scheduler", pid=11, exit_code=-9, log_lines=("boom",))
        world.double.events.on_failure(error)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert await failed is error
        with pytest.raises(EngineDeadError, match="signal 9"):
            world.engine.async_generate("a")
        with pytest.raises(EngineDeadError):
            await world.engine.flush_cache()
        assert not world.engine.is_alive
        assert world.engine.health()["state"] == "dead"
        assert world.engine.stats()["num_streams"] == 0

    async def test_stream_yields_its_output_before_the_error(self, world: World) -> None:
        world.double.step_s = 0.001
        stream = world.engine.async_generate("a", {**LONG, "max_new_tokens": 300}, stream=True)
        text = (await anext(stream))["text"]
        await until(lambda: world.double.live[0].num_output > len(text) + 2)
        world.double.is_held = True
        world.double.events.on_failure(EngineStalledError("no step for 600 s"))
        text += (await anext(stream))["text"]
        with pytest.raises(EngineStalledError):
            await anext(stream)
        assert text == expected_text("a", len(text))
        assert world.engine.health()["state"] == "stalled"

    async def test_finished_rows_survive_with_return_exceptions(self, world: World) -> None:
        params = [GREEDY, LONG]
        generation = world.engine.async_generate(["a", "b"], params, return_exceptions=True)
        await until(lambda: 0 not in world.double.live and bool(world.double.submits))
        world.double.is_held = True
        await asyncio.sleep(0.01)
        world.double.events.on_failure(EngineDeadError("scheduler", pid=11, exit_code=1))
        outs = await generation
        assert outs[0]["text"] == expected_text("a", 6)
        assert isinstance(outs[1], EngineDeadError)

    async def test_control_calls_end(self, world: World) -> None:
        world.double.ignores_aborts_and_controls = True
        waiting = asyncio.ensure_future(world.engine.flush_cache())
        await until(lambda: bool(world.double.controls))
        world.double.events.on_failure(EngineDeadError("detokenizer", pid=12, exit_code=1))
        with pytest.raises(EngineDeadError):
            await waiting

    async def test_lost_control_calls_fail_alone(self, world: World) -> None:
        world.double.ignores_aborts_and_controls = True
        for ask in (world.engine.flush_cache, world.engine.get_server_info, world.engine.stop_profile):
            world.double.controls.clear()
            waiting = asyncio.ensure_future(ask())
            await until(lambda: bool(world.double.controls))
            (control,) = world.double.controls
            world.double.events.on_messages([Reply(control.call_id, False, "it died", stage="crash")])
            with pytest.raises(RequestError, match="it died") as caught:
                await waiting
            assert caught.value.stage == "crash"
        assert world.engine.is_alive


class TestDrain:
    async def test_running_requests_finish_during_a_drain(self, world: World) -> None:
        stream = world.engine.async_generate("a", {**LONG, "max_new_tokens": 50}, stream=True)
        await anext(stream)
        draining = asyncio.create_task(world.engine.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            world.engine.async_generate("b")
        assert world.engine.health()["state"] == "draining"
        assert world.engine.is_alive
        assert [chunk async for chunk in stream][-1]["meta_info"]["finish_reason"] == "length"
        assert await draining is True

    async def test_remaining_requests_end_after_the_timeout(self, world: World) -> None:
        world.double.is_held = True
        generation = world.engine.async_generate("a", LONG)
        assert await world.engine.drain(0.05) is False
        assert (await generation)["meta_info"]["finish_reason"] == "shutdown"

    async def test_drain_without_requests_returns_at_once(self, world: World) -> None:
        assert await world.engine.drain() is True


class TestLargePrompts:
    """Large prompts are checked after the call. Errors are raised by the first await."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_invalid_text_is_refused(self, stream: bool) -> None:
        world = World()
        world.tokenizer.decoder = "WordPiece"  # so the size of a text does not show that it is too long
        await world.engine.start()
        other = world.engine.async_generate("other", {"temperature": 0, "max_new_tokens": 3})
        with pytest.raises(ValueError, match="lone surrogate at position 300000"):
            world.engine.async_generate("é" * 300_000 + "\ud800", stream=stream)
        assert (await other)["text"] == expected_text("other", 3)
        await world.engine.shutdown()

    async def test_wrong_message_after_many_others_is_refused(self, world: World) -> None:
        messages = [{"role": "user", "content": "a"}] * 400
        with pytest.raises(ValueError, match=r"messages\[400\] has no role"):
            await world.engine.async_chat([*messages, {"content": "a"}])
        assert world.double.submits == []

    async def test_more_ids_than_fit_are_refused(self, world: World) -> None:
        with pytest.raises(RequestTooLargeError, match="100001 tokens"):
            await world.engine.async_generate(input_ids=[*range(100_001)])

    @pytest.mark.parametrize("with_tokenizer", [False, True])
    async def test_batch_with_many_ids_is_started_in_parts(self, with_tokenizer: bool) -> None:
        """This keeps iterations of the loop short. An invalid row at the end fails the call."""
        world = World(max_running=MAX_ROWS_AT_ONCE * 4, with_tokenizer=with_tokenizer)
        await world.engine.start()
        generation = world.engine.async_generate(input_ids=[[1, 2, 3]] * (3 * MAX_ROWS_AT_ONCE))
        assert len(world.double.submits) == MAX_ROWS_AT_ONCE
        await until(lambda: len(world.double.submits) == 3 * MAX_ROWS_AT_ONCE)
        await generation.aclose()
        many = [*[[1] * 500] * 150, [VOCAB_SIZE]]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await world.engine.async_generate(input_ids=many, sampling_params={"max_new_tokens": 1})
        await world.engine.shutdown()
