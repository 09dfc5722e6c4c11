"""Requests with hidden states, embeddings, custom processors or beam search, through the complete engine.

One engine serves all of them; each kind has its tests of the runner under ``compute``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import aioengine
from aioengine import Answer, AsyncEngine, Engine
from aioengine.errors import RequestError, RequestTooLargeError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.kit.processors import ADD, BROKEN, FORCE, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process

DEMO = Path(aioengine.__file__).parent / "demo"
PROMPT = "Once upon a time there was a small dragon who lived in a cave"
CAPITAL = "The capital of Italy is"
TEXTS = [PROMPT, CAPITAL]
SIX = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
EIGHT = {"temperature": 0, "max_new_tokens": 8}
MANY = np.zeros((4, 256), np.float32)


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(
        dtype="float32",
        max_total_tokens=4096,
        logprobs_mode="processed",
        logits_processors=NAMES,
        max_hidden_state_bytes=60_000,
    ) as engine:
        yield engine


def forced(token: int, **params: object) -> dict[str, object]:
    return {**EIGHT, "custom_params": {"token": token, **params}}


def test_custom_processors_in_batches_streams_and_samples(llm: Engine) -> None:
    plain = llm.generate("Once upon a time", EIGHT)["output_ids"]
    answers = llm.generate(
        ["Once upon a time"] * 3, [forced(50), EIGHT, forced(60, bias=0)], custom_logit_processor=[FORCE, None, ADD]
    )
    assert answers["output_ids"] == [[50] * 8, plain, plain]
    chunks = llm.generate("a", forced(51), custom_logit_processor=FORCE, stream=True)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == [51] * 8
    samples = llm.generate("a", {**forced(52), "n": 2, "temperature": 1}, custom_logit_processor=FORCE)
    assert [sample["output_ids"] for sample in samples] == [[52] * 8] * 2  # type: ignore[index]


def test_a_processor_that_does_not_end_fails_its_rows_alone(llm: Engine) -> None:
    looping = {**EIGHT, "custom_params": {"how": "loop"}}
    answers = llm.generate(
        ["a"] * 4,
        [looping, EIGHT, looping, EIGHT],
        custom_logit_processor=[BROKEN, BROKEN, BROKEN, None],
        return_exceptions=True,
    )
    for place in (0, 2):
        assert isinstance(answers[place], RequestError)
        assert "it took longer than 1 s" in str(answers[place])
    assert answers[1]["output_ids"] == [7] * 8
    assert answers[3]["output_ids"] == llm.generate("a", EIGHT)["output_ids"]
    assert llm.stats()["num_restarts"] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"custom_logit_processor": "os:system"}, ValueError, "'os:system' is not known: this engine allows tests.kit"),
        ({"custom_logit_processor": 5}, TypeError, "custom_logit_processor must be a string, got 5"),
        ({"custom_logit_processor": ""}, ValueError, "custom_logit_processor is empty; give the name of one"),
        (
            {"sampling_params": forced(50)},
            ValueError,
            r"custom_params=\{'token': 50\} is given without custom_logit_processor",
        ),
        ({"custom_logit_processor": [FORCE]}, TypeError, "custom_logit_processor is a list, but there is one prompt"),
    ],
)
def test_wrong_custom_processors_are_refused_by_the_call(
    llm: Engine, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate("a", **{"sampling_params": EIGHT, **options})  # type: ignore[call-overload]


def states_of(piece: Any) -> list[np.ndarray]:
    return piece["meta_info"]["hidden_states"]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(actual) == len(expected) and all(map(np.array_equal, actual, expected))


def test_hidden_states_of_whole_answers_streams_batches_and_samples_are_the_same(llm: Engine) -> None:
    answer = llm.generate(PROMPT, SIX, return_hidden_states=True)
    states = states_of(answer)
    assert [state.ndim for state in states] == [2, 1, 1, 1, 1, 1]
    assert len(states[0]) == answer["meta_info"]["prompt_tokens"]
    assert {(state.dtype, state.shape[-1]) for state in states} == {(np.dtype(np.float32), states[0].shape[1])}
    states[0][0] = 0.0  # the arrays are writable

    states = states_of(llm.generate(PROMPT, SIX, return_hidden_states=True))
    streamed: list[np.ndarray] = []
    for chunk in llm.generate(PROMPT, SIX, return_hidden_states=True, stream=True):
        assert len(states_of(chunk)) == len(chunk["output_ids"])
        streamed += states_of(chunk)
    assert same(streamed, states)

    batch = llm.generate([PROMPT] * 4, SIX, return_hidden_states=[True, False, "last", None])
    assert same(states_of(batch[0]), states)
    assert same(states_of(batch[2]), states[-1:])
    assert ["hidden_states" in row["meta_info"] for row in batch] == [True, False, True, False]
    assert batch["output_ids"] == [answer["output_ids"]] * 4
    samples = llm.generate(PROMPT, {**SIX, "n": 2}, return_hidden_states=True)
    assert all(same(states_of(sample), states) for sample in samples)


def test_last_hidden_state_is_in_the_last_chunk(llm: Engine) -> None:
    whole = llm.generate(PROMPT, SIX, return_hidden_states=True)
    stop = llm.tokenizer.decode(whole["output_ids"][2:4])
    for params in (SIX, {**SIX, "stop": stop}, {**SIX, "stop_regex": stop[-1]}):
        last_states = [
            states_of(chunk) for chunk in llm.generate(PROMPT, params, return_hidden_states="last", stream=True)
        ]
        answer = llm.generate(PROMPT, params, return_hidden_states="last")
        num_tokens = answer["meta_info"]["completion_tokens"]
        assert all(states == [] for states in last_states[:-1])
        last = states_of(whole)[num_tokens - 1]
        assert same(last_states[-1], [last[-1] if num_tokens == 1 else last])
        assert same(states_of(answer), last_states[-1])
        states = states_of(llm.generate(PROMPT, params, return_hidden_states=True))
        assert same(states, states_of(whole)[:num_tokens])


@pytest.mark.parametrize(
    ("value", "error"),
    [("first", ValueError), (1, TypeError), (["last", "x"], TypeError), ("LAST", ValueError)],
)
def test_wrong_hidden_state_options_are_refused_by_the_call(llm: Engine, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="return_hidden_states"):
        llm.generate(PROMPT, SIX, return_hidden_states=value)  # type: ignore[call-overload]


def test_too_many_hidden_states_are_refused(llm: Engine) -> None:
    params = {**SIX, "max_new_tokens": 60}
    with pytest.raises(RequestTooLargeError, match="max_hidden_state_bytes=60000 are allowed"):
        llm.generate(PROMPT, params, return_hidden_states=True)
    rows = llm.generate([PROMPT, PROMPT], [params, SIX], return_hidden_states=True, return_exceptions=True)
    assert isinstance(rows[0], RequestTooLargeError)
    assert len(states_of(rows[1])) == 6
    assert len(states_of(llm.generate(PROMPT, params, return_hidden_states="last"))) == 1


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The embeddings [V, D] of the demo model."""
    [file] = DEMO.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor("model.embed_tokens.weight").float()


@pytest.fixture(scope="module")
def embeds(llm: Engine, table: torch.Tensor) -> list[np.ndarray]:
    return [table[llm.tokenizer.encode(prompt)].numpy() for prompt in TEXTS]


def test_embeddings_give_the_answers_of_their_ids(llm: Engine, embeds: list[np.ndarray]) -> None:
    expected = llm.generate(TEXTS, SIX)
    forms: list[Any] = [
        embeds,
        [array.astype(np.float64) for array in embeds],
        [torch.from_numpy(array) for array in embeds],
    ]
    for form in [*forms, [array.tolist() for array in embeds]]:
        batch = llm.generate(input_embeds=form, sampling_params=SIX)
        assert batch["output_ids"] == expected["output_ids"]
        assert batch["meta_info"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    three = llm.generate(input_embeds=np.stack([embeds[1], embeds[1]]), sampling_params=SIX)
    assert [row["output_ids"] for row in three] == [expected[1]["output_ids"]] * 2  # type: ignore[index]
    for prompt_form in (embeds[0], torch.from_numpy(embeds[0]), embeds[0].tolist(), list(embeds[0])):
        answer = llm.generate(input_embeds=prompt_form, sampling_params=SIX)
        assert answer["output_ids"] == expected[0]["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == 0


def test_embeddings_in_streams_and_samples_with_the_options_of_a_call(llm: Engine, embeds: list[np.ndarray]) -> None:
    expected = llm.generate(TEXTS[0], SIX, return_logprob=True, top_logprobs_num=2)
    chunks = llm.generate(input_embeds=embeds[0], sampling_params=SIX, stream=True)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == expected["output_ids"]
    actual = llm.generate(input_embeds=embeds[0], sampling_params=SIX, return_logprob=True, top_logprobs_num=2)
    for key in ("output_token_logprobs", "output_top_logprobs"):
        assert actual["meta_info"][key] == expected["meta_info"][key]  # type: ignore[literal-required]
    params = {**SIX, "n": 3, "temperature": 1, "seed": 5}
    samples, by_ids = llm.generate(input_embeds=embeds[0], sampling_params=params), llm.generate(TEXTS[0], params)
    assert [sample["output_ids"] for sample in samples] == [by_id["output_ids"] for by_id in by_ids]  # type: ignore[index]
    end = llm.generate(input_ids=llm.tokenizer.encode(TEXTS[0])[-5:], sampling_params=SIX)
    cut = llm.generate(input_embeds=embeds[0], sampling_params=SIX, truncate_prompt_tokens=5)
    assert cut["output_ids"] == end["output_ids"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_embeds": MANY, "prompt": "a"}, ValueError, "input_embeds is given together with a prompt"),
        ({"input_embeds": MANY, "input_ids": [1]}, ValueError, "input_embeds is given together with a prompt"),
        ({"input_embeds": []}, ValueError, "none of them empty"),
        ({"input_embeds": np.zeros((0, 256))}, ValueError, "none of them empty"),
        ({"input_embeds": "abc"}, TypeError, "input_embeds must be a float array"),
        ({"input_embeds": 5}, TypeError, "input_embeds must be a float array"),
        ({"input_embeds": [1, 2]}, TypeError, "input_embeds must be a float array .* got an array of int64"),
        ({"input_embeds": [0.5, 0.5]}, ValueError, r"got the shape \[2\]"),
        ({"input_embeds": MANY.astype(int)}, TypeError, "got an array of int64"),
        ({"input_embeds": [[1.0, 2.0], [1.0]]}, TypeError, "cannot be converted"),
        ({"input_embeds": MANY * np.nan}, ValueError, "must have finite numbers"),
        ({"input_embeds": MANY.astype(np.float64) + 1e300}, ValueError, "must have finite numbers"),
        ({"input_embeds": MANY[:, :100]}, ValueError, "the width 100; this model needs 256"),
        ({"input_embeds": [MANY, MANY[:, :100]]}, ValueError, "the width 100"),
        ({"input_embeds": MANY, "return_prompt_token_ids": True}, ValueError, "return_prompt_token_ids is for prompts"),
        ({"input_embeds": MANY, "add_special_tokens": True}, ValueError, "add_special_tokens=True works only for text"),
        (
            {"input_embeds": MANY, "return_logprob": True, "logprob_start_len": 0},
            ValueError,
            "logprob_start_len=0 needs token ids, and .*leave it out",
        ),
        ({"input_embeds": np.zeros((5000, 256))}, RequestTooLargeError, "5000 tokens"),
    ],
)
def test_wrong_embeddings_are_refused(
    llm: Engine, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(**options)


def test_a_row_of_embeddings_that_is_wrong_fails_alone(llm: Engine, embeds: list[np.ndarray]) -> None:
    rows = llm.generate(
        input_embeds=[embeds[0], MANY * np.nan, MANY[:, :9], embeds[1]], sampling_params=SIX, return_exceptions=True
    )
    assert [isinstance(row, ValueError) for row in rows] == [False, True, True, False]


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.mark.parametrize(("width", "length", "penalty"), [(4, 12, 1.0), (2, 8, 0.0), (3, 10, 2.0)])
def test_beam_search_equals_transformers(
    llm: Engine, theirs: torch.nn.Module, width: int, length: int, penalty: float
) -> None:
    ids = llm.tokenizer.encode(CAPITAL)
    actual = llm.beam_search(CAPITAL, width, length, penalty)
    with torch.inference_mode():
        expected = theirs.generate(
            torch.tensor([ids]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=length,
            length_penalty=penalty,
            early_stopping="never",
            do_sample=False,
            eos_token_id=list(llm.tokenizer.eos_token_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = [row[len(ids) :].tolist() for row in expected.sequences]
    for answer, sequence, score in zip(actual, sequences, expected.sequences_scores.tolist(), strict=True):
        num_tokens = len(answer["output_ids"])
        assert sequence[:num_tokens] == answer["output_ids"]
        assert set(sequence[num_tokens:]) <= {0}
        assert answer["meta_info"]["sequence_score"] == pytest.approx(score, abs=1e-4)
        assert answer["meta_info"]["completion_tokens"] == num_tokens
        is_stopped = answer["output_ids"][-1] in llm.tokenizer.eos_token_ids
        assert answer["meta_info"]["finish_reason"] == ("stop" if is_stopped else "length")
    assert actual["text"] == [llm.tokenizer.decode(ids + answer["output_ids"])[len(CAPITAL) :] for answer in actual]


def test_beam_search_uses_distribution_parameters_if_logprobs_are_processed(llm: Engine) -> None:
    plain = llm.beam_search(CAPITAL, 2, 6)
    word = plain[0]["text"].split()[0]
    without = llm.beam_search(llm.tokenizer.encode(CAPITAL), 2, 6, bad_words=[word])
    assert all(answer["text"].split()[0] != word for answer in without)
    allowed = llm.beam_search(CAPITAL, 2, 3, allowed_token_ids=[50, 60], ignore_eos=True)
    assert {token for answer in allowed for token in answer["output_ids"]} <= {50, 60}
    stopped = llm.beam_search(CAPITAL, 2, 6, stop_token_ids=[plain[0]["output_ids"][1]], ignore_eos=False)
    assert any(answer["meta_info"]["finish_reason"]["matched"] == plain[0]["output_ids"][1] for answer in stopped)


async def test_beam_search_of_both_engines_on_any_loop(llm: Engine) -> None:
    expected = llm.beam_search(CAPITAL, 3, 5)
    actual = await llm.async_beam_search(CAPITAL, beam_width=3, max_new_tokens=5)
    assert actual["output_ids"] == expected["output_ids"]
    assert actual["meta_info"]["sequence_score"] == sorted(expected["meta_info"]["sequence_score"], reverse=True)
    with fake_engine() as fake:
        expected = fake.beam_search(CAPITAL, 3, 5)
    async with fake_async_engine() as engine:
        assert (await engine.async_beam_search(CAPITAL, 3, 5))["output_ids"] == expected["output_ids"]
        with pytest.raises(ValueError, match="takes 'temperature' only if"):
            await engine.async_beam_search(CAPITAL, temperature=0.5)


def test_wrong_beam_search_arguments_are_refused(llm: Engine) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.beam_search("")
    for wrong in ([[1, 2], [3]], ["a", "b"], np.array([[1, 2]]), None, 5, {1}):
        with pytest.raises(TypeError, match="prompt must be one prompt, a string or a list of token ids, got"):
            llm.beam_search(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestTooLargeError, match="max_new_tokens=100000"):
        llm.beam_search("a", max_new_tokens=100_000)


async def test_all_kinds_of_requests_continue_after_a_lost_scheduler(embeds: list[np.ndarray], tmp_path: Path) -> None:
    async with AsyncEngine(dtype="float32", max_total_tokens=4096, logits_processors=NAMES) as engine:

        async def read(**custom: object) -> list[np.ndarray]:
            params = {**SIX, "custom_params": {"token": 50, **custom}}
            stream = engine.async_generate(
                PROMPT, params, stream=True, custom_logit_processor=FORCE, return_hidden_states=True
            )
            return [state async for chunk in stream for state in states_of(chunk)]

        async def ask(**custom: object) -> tuple[list[np.ndarray], list[list[int]]]:
            random = {**SIX, "temperature": 1, "seed": 5, "bad_words": ["dragon"]}
            states, rows, samples = await asyncio.gather(
                read(**custom),
                engine.async_generate(input_embeds=embeds, sampling_params=random, return_hidden_states="last"),
                engine.async_generate(PROMPT, {**random, "allowed_token_ids": list(range(9, 900)), "n": 2}),
            )
            many = cast("list[Answer]", samples)
            return [*states, *(states_of(row)[0] for row in rows)], [row["output_ids"] for row in [*rows, *many]]

        disturbed = await ask(file=str(tmp_path / "killed"))
        assert engine.stats()["num_restarts"] == 1
        expected = await ask()
        assert same(disturbed[0], expected[0])
        assert disturbed[1] == expected[1]
