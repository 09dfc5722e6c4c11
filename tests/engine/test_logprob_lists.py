"""Logprobs in answers and chunks have one entry per token, also after preemptions and lost processes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from aioengine import RequestTooLargeError
from aioengine.api.answers import Answer, Chunk
from aioengine.api.engine import AsyncEngine
from aioengine.frontend.intake import prompt_options
from aioengine.protocol.columns import Extra
from aioengine.protocol.packed_logprobs import OUTPUT_LOGPROBS, LogprobDecoder, LogprobRules
from aioengine.testing.byte_tokenizer import VOCAB_SIZE
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine
from aioengine.testing.fake_runner import fake_logprobs
from aioengine.testing.faults import Faults

pytestmark = pytest.mark.one_loop

PARAMS = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
PROMPT = "a story of lists"
ASKED = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [101, 5]}
RULES = LogprobRules(num_top=2, token_ids=(101, 5))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with fake_async_engine() as engine:
        yield engine


def entries_of(piece: Answer | Chunk, side: str, name: str) -> list[Any]:
    return cast("list[Any]", dict(piece["meta_info"])[f"{side}_{name}_logprobs"])


def check_output(piece: Answer | Chunk, rules: LogprobRules = RULES) -> None:
    """Check that the lists of the piece have the logprobs of its own tokens."""
    extras = [
        Extra(0, index, OUTPUT_LOGPROBS, fake_logprobs(rules, token_id, VOCAB_SIZE))
        for index, token_id in enumerate(piece["output_ids"])
    ]
    decoder = LogprobDecoder(rules, 0)
    for extra in extras:
        decoder.decode(extra)
    expected = decoder.lists(0, len(extras), keeps=False)
    actual = {name: value for name, value in piece["meta_info"].items() if name.startswith("output_")}
    assert actual == {name: value for name, value in expected.items() if name.startswith("output_")}
    assert len(entries_of(piece, "output", "token")) == len(piece["output_ids"])
    assert "extras" not in piece


def check_prompt(piece: Answer | Chunk, prompt: str, start: int) -> None:
    ids = list(prompt.encode())
    assert [token_id for _, token_id, _ in entries_of(piece, "input", "token")] == (ids[start:] if start >= 0 else [])
    without = [place for place, (value, _, _) in enumerate(entries_of(piece, "input", "token")) if value is None]
    assert without == ([0] if start == 0 else [])
    expected = piece["meta_info"]["prompt_tokens"] - start if start >= 0 else 0
    assert len(entries_of(piece, "input", "token")) == expected


@pytest.mark.parametrize("start", [-1, 0, 3, 16])
async def test_answers_and_chunks_have_an_entry_for_each_token(engine: AsyncEngine, start: int) -> None:
    options = {**ASKED, "logprob_start_len": start}
    whole = await engine.async_generate(PROMPT, PARAMS, **options)
    assert len(whole["output_ids"]) == 30
    check_output(whole)
    check_prompt(whole, PROMPT, start)
    assert len(entries_of(whole, "input", "top")) == len(entries_of(whole, "input", "token"))
    chunks = [chunk async for chunk in engine.async_generate(PROMPT, PARAMS, stream=True, **options)]
    check_prompt(chunks[0], PROMPT, start)
    for chunk in chunks:
        check_output(chunk)
    assert not any(name.startswith("input_") for chunk in chunks[1:] for name in chunk["meta_info"])
    joined = [entry for chunk in chunks for entry in entries_of(chunk, "output", "token")]
    assert joined == entries_of(whole, "output", "token")


@pytest.mark.parametrize("params", [{"stop": "the e"}, {"stop": "e", "no_stop_trim": True}, {"stream_interval": 7}])
async def test_tokens_with_held_text_have_entries(engine: AsyncEngine, params: dict[str, object]) -> None:
    async for chunk in engine.async_generate(PROMPT, {**PARAMS, **params}, stream=True, **ASKED):
        check_output(chunk)
    check_output(await engine.async_generate(PROMPT, {**PARAMS, **params}, **ASKED))


async def test_each_row_of_a_batch_has_its_own_logprobs(engine: AsyncEngine) -> None:
    prompts = ["one", "two two", "three", "four"]
    outs = await engine.async_generate(
        prompts,
        PARAMS,
        return_logprob=[True, False, True, None],
        top_logprobs_num=[0, 5, 3, 1],
        logprob_start_len=[1, 0, None, 0],
        token_ids_logprob=[None, [1], [4, 4], [2]],
        return_text_in_logprobs=[False, True, None, True],
    )
    check_output(outs[0], LogprobRules())
    check_prompt(outs[0], "one", 1)
    check_output(outs[2], LogprobRules(num_top=3, token_ids=(4, 4)))
    for out in (outs[1], outs[3]):
        assert not any("logprob" in name for name in out["meta_info"])
    assert outs["meta_info"]["output_token_logprobs_length"] == [30, None, 30, None]


async def test_samples_have_their_own_entries(engine: AsyncEngine) -> None:
    outs = await engine.async_generate(PROMPT, {**PARAMS, "n": 3}, logprob_start_len=2, **ASKED)
    for out in outs:
        check_output(out)
        check_prompt(out, PROMPT, 2)
    assert len({tuple(out["output_ids"]) for out in outs}) == 3


async def test_texts_are_those_of_the_tokens(engine: AsyncEngine) -> None:
    out = await engine.async_generate(PROMPT, PARAMS, return_text_in_logprobs=True, logprob_start_len=0, **ASKED)
    texts = "".join(text for _, _, text in entries_of(out, "output", "token"))
    assert texts == out["text"]
    assert "".join(text for _, _, text in entries_of(out, "input", "token")) == PROMPT
    for position in (*entries_of(out, "output", "token_ids"), *entries_of(out, "input", "token_ids")[1:]):
        assert [text for _, _, text in position] == ["e", "\x05"]


async def test_request_without_new_tokens_returns_the_next_distribution(engine: AsyncEngine) -> None:
    out = await engine.async_generate(PROMPT, {"max_new_tokens": 0}, logprob_start_len=4, **ASKED)
    assert (out["output_ids"], out["text"], out["meta_info"]["finish_reason"]) == ([], "", "length")
    assert [len(entries_of(out, "output", name)) for name in ("token", "top", "token_ids")] == [0, 1, 1]
    check_prompt(out, PROMPT, 4)
    chunks = [chunk async for chunk in engine.async_generate(PROMPT, {"max_new_tokens": 0}, stream=True, **ASKED)]
    assert [len(entries_of(chunk, "output", "top")) for chunk in chunks] == [1]
    plain = await engine.async_generate(PROMPT, {"max_new_tokens": 0})
    assert plain["meta_info"]["finish_reason"] == "length"


async def test_attached_reader_gets_the_logprobs_of_its_chunks(engine: AsyncEngine) -> None:
    stream = engine.async_generate(PROMPT, PARAMS, stream=True, rid="mine", resume_ttl=60, logprob_start_len=0, **ASKED)
    first = await anext(stream)
    check_prompt(first, PROMPT, 0)
    await stream.aclose()
    async for chunk in engine.attach("mine", from_offset=len(first["text"])):
        check_output(chunk)
    chunks = [chunk async for chunk in engine.attach("mine")]
    check_prompt(chunks[0], PROMPT, 0)


async def test_answer_aborted_at_once_has_empty_lists(engine: AsyncEngine) -> None:
    generation = engine.async_generate(PROMPT, PARAMS, logprob_start_len=0, **ASKED)
    generation.abort()
    out = await generation
    assert out["meta_info"]["finish_reason"] == "abort"
    check_output(out)
    assert entries_of(out, "input", "token") == []


async def test_scripted_answers_have_entries() -> None:
    async with fake_async_engine(answers={"": "Paris."}) as engine:
        out = await engine.async_generate(PROMPT, logprob_start_len=1, **ASKED)
        assert out["text"] == "Paris."
        check_output(out)
        check_prompt(out, PROMPT, 1)
        assert (await engine.async_generate(PROMPT, {"max_new_tokens": 0}, **ASKED))["output_ids"] == []


async def test_preempted_requests_have_each_entry_once() -> None:
    async with fake_async_engine(num_pages=12, context_length=128) as engine:
        prompts = [f"{i} of them" for i in range(8)]
        outs = await engine.async_generate(prompts, {**PARAMS, "max_new_tokens": 60}, logprob_start_len=0, **ASKED)
        assert engine.stats()["num_preemptions"]
        for prompt, out in zip(prompts, outs, strict=True):
            check_output(out)
            check_prompt(out, prompt, 0)


@pytest.mark.process
@pytest.mark.parametrize("kill_at", [1, 2, 11])
async def test_a_lost_scheduler_changes_no_entry(kill_at: int, tmp_path: Path) -> None:
    faults = Faults(kill_at=kill_at, once=str(tmp_path / "once"))
    setup = FakeSetup(faults=faults, chunk_tokens=8, max_running=8)
    async with AsyncEngine.from_blueprint(setup.blueprint) as engine:
        chunks = [
            chunk
            async for chunk in engine.async_generate(
                PROMPT, {**PARAMS, "stop": "qzqz"}, stream=True, logprob_start_len=0, **ASKED
            )
        ]
        assert engine.stats()["num_restarts"] == 1
    check_prompt(chunks[0], PROMPT, 0)
    for chunk in chunks:
        check_output(chunk)
    assert sum(len(chunk["output_ids"]) for chunk in chunks) == 30


Wrong = tuple[dict[str, object], type[Exception], str]
WRONG_AT_CALL: list[Wrong] = [
    ({"return_logprob": 1}, TypeError, "return_logprob must be True or False, got 1"),
    ({"logprob_start_len": -2}, ValueError, "logprob_start_len must be an integer of at least -1, got -2"),
    ({"logprob_start_len": 1.5}, TypeError, "logprob_start_len must be an integer"),
    ({"top_logprobs_num": -1}, ValueError, "top_logprobs_num must be an integer of at least 0, got -1"),
    ({"top_logprobs_num": VOCAB_SIZE + 1}, ValueError, f"top_logprobs_num must be at most {VOCAB_SIZE}"),
    ({"token_ids_logprob": "abc"}, TypeError, "token_ids_logprob must be a list of token ids"),
    ({"token_ids_logprob": [1, True]}, TypeError, "token_ids_logprob must be an integer"),
    ({"token_ids_logprob": [1, -3]}, ValueError, "token_ids_logprob must be an integer of at least 0, got -3"),
    ({"token_ids_logprob": [1, VOCAB_SIZE]}, ValueError, f"from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
    ({"token_ids_logprob": [0] * 70_000}, ValueError, "at most 65536 entries, got 70000"),
    ({"token_ids_logprob": [[1]]}, TypeError, "token_ids_logprob is a list, but there is one prompt"),
    ({"return_logprob": [True]}, TypeError, "return_logprob is a list, but there is one prompt"),
    ({"return_text_in_logprobs": "yes"}, TypeError, "return_text_in_logprobs must be True or False"),
    ({"prompt": ["a", "b"], "return_logprob": [True]}, ValueError, "return_logprob has 1 entry for 2 prompts"),
    ({"prompt": ["a", "b"], "token_ids_logprob": [[1], 2]}, TypeError, "token_ids_logprob must be a list"),
    ({"prompt": ["a", "b"], "top_logprobs_num": [1, -1]}, ValueError, "top_logprobs_num must be an integer"),
    (
        {"prompt": ["a"], "sampling_params": {"n": 2}, "top_logprobs_num": [1]},
        ValueError,
        "top_logprobs_num is a list, and n is 2",
    ),
    (
        {"prompt": ["a"], "sampling_params": {"n": 2}, "token_ids_logprob": [[1]]},
        ValueError,
        "token_ids_logprob is a list, and n is 2",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_AT_CALL)
async def test_wrong_logprob_options_are_refused_by_name(
    engine: AsyncEngine, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.async_generate(**{"prompt": "a", "return_logprob": True, **arguments})


async def test_wrong_row_fails_alone_but_a_wrong_call_fails_completely(engine: AsyncEngine) -> None:
    prompts: dict[str, Any] = {"prompt": ["a", "b"], "return_logprob": True, "return_exceptions": True}
    with pytest.raises(ValueError, match="top_logprobs_num must be at most"):
        engine.async_generate(**prompts, top_logprobs_num=VOCAB_SIZE + 1)
    outs = await engine.async_generate(**prompts, top_logprobs_num=[VOCAB_SIZE + 1, VOCAB_SIZE])
    assert isinstance(outs[0], ValueError)
    assert [len(position) for position in entries_of(outs[1], "output", "top")] == [VOCAB_SIZE] * 128


async def test_chat_has_entries() -> None:
    async with fake_async_engine(answers={"": "Hello."}) as engine:
        check_output(await engine.async_chat([{"role": "user", "content": "Hi"}], **ASKED))


async def test_logprob_options_that_do_not_fit_the_prompt_raise_at_the_await(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="logprob_start_len must be at most 3, the tokens of the prompt, got 4"):
        await engine.async_generate("abc", return_logprob=True, logprob_start_len=4)
    with pytest.raises(ValueError, match="logprob_start_len must be at most 3"):
        async for _ in engine.async_generate("abc", return_logprob=True, logprob_start_len=4, stream=True):
            pass
    monkeypatch.setattr(prompt_options, "MAX_PROMPT_VALUES", 20)
    monkeypatch.setattr(prompt_options, "MAX_OUTPUT_VALUES", 200)
    with pytest.raises(RequestTooLargeError, match="11 logprobs at each of 3 prompt tokens are more than 20"):
        await engine.async_generate("abc", return_logprob=True, logprob_start_len=0, top_logprobs_num=10)
    with pytest.raises(RequestTooLargeError, match="11 logprobs at each of 30 output tokens are more than 200"):
        await engine.async_generate("abc", PARAMS, return_logprob=True, top_logprobs_num=10)


async def test_logprob_options_may_be_passed_with_return_logprob_false(engine: AsyncEngine) -> None:
    asked = {"top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [3], "return_text_in_logprobs": True}
    out = await engine.async_generate(PROMPT, PARAMS, return_logprob=False, **asked)  # type: ignore[call-overload]
    assert not any("logprob" in name for name in out["meta_info"])
    off = {"top_logprobs_num": 0, "logprob_start_len": -1, "token_ids_logprob": [], "return_text_in_logprobs": False}
    out = await engine.async_generate(PROMPT, PARAMS, **off)  # type: ignore[call-overload]
    assert not any("logprob" in name for name in out["meta_info"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs_num", 2),
        ("logprob_start_len", 0),
        ("token_ids_logprob", [3]),
        ("return_text_in_logprobs", True),
        ("top_logprobs_num", [0, 2]),
    ],
)
async def test_logprob_options_without_return_logprob_are_refused(
    engine: AsyncEngine, name: str, value: object
) -> None:
    prompt = ["a", "b"] if isinstance(value, list) and name == "top_logprobs_num" else "a"
    message = re.escape(f"{name}={value!r} is given without return_logprob; add return_logprob=True")
    for extra in ({}, {"return_logprob": None}):
        with pytest.raises(ValueError, match=message):
            engine.async_generate(prompt, PARAMS, **{name: value}, **extra)  # type: ignore[call-overload]


async def test_prompt_token_ids_are_returned_with_the_text(engine: AsyncEngine) -> None:
    out = await engine.async_generate("abc", PARAMS, return_prompt_token_ids=True, **ASKED)
    assert out["prompt_token_ids"] == [97, 98, 99]
