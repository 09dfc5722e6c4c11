"""The complete engine with the demo model: a request has the same answer in all ways to send it."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from aioengine import Engine
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.model_files.vocabulary import num_token_ids
from aioengine.tokenization.tokenizer import Tokenizer
from tests.compute.runner_world import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aioengine import Answer

pytestmark = pytest.mark.process

PROMPTS = [
    "The capital of France is",
    "Hello, my name is",
    "Write a JSON object about a cat:",
    "日本の首都は",
    "🙂🙃",
    "Once upon a time there was a small dragon who " * 12,
    "a",
]
SAMPLINGS: list[dict[str, object]] = [
    {"temperature": 0, "max_new_tokens": 32},
    {"seed": 1, "max_new_tokens": 32},
    {"seed": 2, "temperature": 1.4, "top_p": 0.9, "max_new_tokens": 32},
    {"seed": 3, "top_k": 20, "repetition_penalty": 1.3, "max_new_tokens": 32},
    {
        "seed": 4,
        "min_p": 0.02,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "max_new_tokens": 64,
        "ignore_eos": True,
    },
    {
        "seed": 5,
        "logit_bias": {"40": 2.0},
        "bad_words": ["time", "small dragon"],
        "min_new_tokens": 10,
        "max_new_tokens": 64,
        "ignore_eos": True,
    },
    {"temperature": 0, "repetition_penalty": 1.2, "stop": [" a", "ing"], "max_new_tokens": 32},
]
# Answers must have the same bits with all chunks, pages, batches and orders.
WAYS: list[dict[str, object]] = [
    {"chunked_prefill_size": 16, "page_size": 1, "max_running_requests": 3},
    {"chunked_prefill_size": 64, "page_size": 32, "disable_radix_cache": True, "schedule_policy": "lpm"},
    {
        "max_total_tokens": 256,
        "page_size": 4,
        "context_length": 256,
        "chunked_prefill_size": 48,
        "max_running_requests": 7,
    },
]


def essence(answer: Answer) -> tuple[str, list[int], object]:
    return answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(random_seed=7) as engine:
        yield engine


@pytest.fixture(scope="module")
def single_answers(engine: Engine) -> list[tuple[str, list[int], object]]:
    """Return the answers of single prompts with their parameters and an empty cache."""
    answers = []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        assert engine.flush_cache()
        answers.append(essence(engine.generate(prompt, sampling)))
    return answers


def test_batch_cache_and_order_change_nothing(
    engine: Engine, single_answers: list[tuple[str, list[int], object]]
) -> None:
    for _ in range(2):
        assert [essence(answer) for answer in engine.generate(PROMPTS, SAMPLINGS)] == single_answers
    answers = engine.generate(PROMPTS[::-1], SAMPLINGS[::-1])
    assert [essence(answer) for answer in answers][::-1] == single_answers
    assert engine.generate(PROMPTS[5], SAMPLINGS[5])["meta_info"]["cached_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_chunks_pages_and_preemptions_change_nothing(
    way: dict[str, object], single_answers: list[tuple[str, list[int], object]]
) -> None:
    with Engine(**way) as engine:
        twice = engine.generate(PROMPTS + PROMPTS, SAMPLINGS + SAMPLINGS)
        assert [essence(answer) for answer in twice] == single_answers + single_answers
        num_preemptions = sum(answer["meta_info"]["num_preemptions"] for answer in twice)
        assert (num_preemptions > 0) is ("max_total_tokens" in way)


def test_the_repr_names_the_model_and_the_state(engine: Engine) -> None:
    assert repr(engine) == "<Engine demo model running>"
    assert repr(engine.tokenizer).startswith("<Tokenizer BPE, vocab_size=")


def test_stream_joins_to_the_answer(engine: Engine, single_answers: list[tuple[str, list[int], object]]) -> None:
    for prompt, sampling, (text, output_ids, reason) in zip(PROMPTS, SAMPLINGS, single_answers, strict=True):
        chunks = list(engine.generate(prompt, {**sampling, "stream_interval": 3}, stream=True))
        assert "".join(chunk["text"] for chunk in chunks) == text
        assert [token for chunk in chunks for token in chunk["output_ids"]] == output_ids
        assert chunks[-1]["meta_info"]["finish_reason"] == reason
        num_chars = num_ids = 0
        for chunk in chunks:
            assert (chunk["text_offset"], chunk["token_offset"]) == (num_chars, num_ids)
            num_chars += len(chunk["text"])
            num_ids += len(chunk["output_ids"])
            assert chunk["meta_info"]["completion_tokens"] == num_ids


def test_samples_equal_single_calls_with_their_seeds(engine: Engine) -> None:
    sampling: dict[str, object] = {"max_new_tokens": 16, "temperature": 1.2}
    samples = engine.generate(PROMPTS[:2], {**sampling, "n": 3, "seed": 40})
    assert [answer["meta_info"]["seed"] for answer in samples] == [40, 41, 42] * 2
    for place, sample in enumerate(samples):
        single = engine.generate(PROMPTS[place // 3], {**sampling, "seed": 40 + place % 3})
        assert essence(single) == essence(sample)
    assert len({answer["text"] for answer in samples}) > 2


def test_reported_seed_reproduces_the_answer(engine: Engine) -> None:
    first, second = (engine.generate(PROMPTS[1], {"max_new_tokens": 16}) for _ in range(2))
    seeds = [answer["meta_info"]["seed"] for answer in (first, second)]
    assert seeds[0] != seeds[1]
    for answer, seed in zip((first, second), seeds, strict=True):
        assert essence(engine.generate(PROMPTS[1], {"max_new_tokens": 16, "seed": seed})) == essence(answer)


def test_a_prompt_may_end_anywhere_in_a_character(engine: Engine) -> None:
    """The answer has no text of the prompt and no incomplete character, although the prompt may end in a character."""
    ids = engine.tokenizer.encode("The flags 🇫🇷 and 🙂, and 日本")
    sampling = {"temperature": 0, "max_new_tokens": 12}
    for end in range(1, len(ids) + 1):
        prompt = ids[:end]
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        whole = engine.tokenizer.decode([*prompt, *answer["output_ids"]])
        begun = engine.tokenizer.decode(prompt).rstrip("�")
        assert whole.startswith(begun)
        added = whole[len(begun) :]
        if begun != engine.tokenizer.decode(prompt):  # bytes without a character belong to the prompt
            added = added.removeprefix("�")
        assert answer["text"] == added
        chunks = list(
            engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 12}, stream=True)
        )
        assert "".join(chunk["text"] for chunk in chunks) == answer["text"]


def test_repetition_penalty_counts_the_prompt(engine: Engine) -> None:
    """The most likely next token is in the prompt. The penalty excludes it, although it is not in the output."""
    likely = engine.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 1})["output_ids"][0]
    prompt = [likely, *engine.tokenizer.encode(PROMPTS[0])]
    plain = {"temperature": 0, "max_new_tokens": 1}
    assert engine.generate(input_ids=prompt, sampling_params=plain)["output_ids"] == [likely]
    assert engine.generate(input_ids=prompt, sampling_params={**plain, "repetition_penalty": 2.0})["output_ids"] != [
        likely
    ]
    for penalty in ("frequency_penalty", "presence_penalty"):  # these penalties count only the output
        assert engine.generate(input_ids=prompt, sampling_params={**plain, penalty: 2.0})["output_ids"] == [likely]


def test_turns_of_a_session_are_the_plain_requests_of_all_their_ids(engine: Engine) -> None:
    sampling: dict[str, object] = {"temperature": 0, "max_new_tokens": 24}
    sid = engine.open_session()
    rid, history = None, list[int]()
    for text in ("Once upon a time", " One day", " Then", " At last"):
        turn = engine.generate(text, sampling, session_params={"id": sid, "rid": rid})
        history += engine.tokenizer.encode(text)
        assert (turn["meta_info"]["cached_tokens"] > 0) is (rid is not None)
        assert engine.flush_cache()  # pinned pages are evicted, so the plain request computes all tokens
        assert essence(engine.generate(input_ids=history, sampling_params=sampling)) == essence(turn)
        rid, history = turn["meta_info"]["id"], history + turn["output_ids"]
    engine.close_session(sid)


def test_timings_add_up_to_the_wall_time(engine: Engine) -> None:
    timings = engine.generate(PROMPTS[5], {"max_new_tokens": 8, "temperature": 0})["meta_info"]["timings"]
    stages = [timings[name] for name in ("tokenize_s", "queue_s", "prefill_s", "decode_s", "deliver_s")]  # type: ignore[literal-required]
    assert min(stages) >= 0
    assert sum(stages) == pytest.approx(timings["total_s"], abs=1e-6)
    assert timings["decode_s"] > 0
    assert timings["prefill_s"] > 0


def test_decode_continues_while_a_long_prompt_is_computed(engine: Engine) -> None:
    """Chunks of a stream keep coming between the arrival of a prompt of three chunks and its first token."""

    async def main() -> int:
        num_tokens = 0
        long: asyncio.Task[Answer] | None = None
        stream = engine.async_generate("Hello", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
        async for chunk in stream:
            if long is None:
                prompt = [7] * 1900
                long = asyncio.create_task(
                    engine.async_generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
                )
            elif long.done():
                break
            else:
                num_tokens += len(chunk["output_ids"])
        assert long is not None
        assert long.done()
        await stream.aclose()
        return num_tokens

    assert asyncio.run(main()) >= 3


ADDED_TOKEN = {"content": "<end>", "special": True}


@pytest.mark.slow
def test_an_added_end_of_text_is_sampled_and_ends_the_answer(tmp_path: Path) -> None:
    num_ids = num_token_ids(str(DEMO_MODEL))
    save_model("llama", tmp_path, vocab_size=num_ids + 28)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    for described in ({"added_tokens_decoder": {str(num_ids): ADDED_TOKEN}}, {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", **described}))
        assert Tokenizer(tmp_path).eos_token_id == num_ids
    with Engine(str(tmp_path), max_total_tokens=1000) as engine:
        assert engine.tokenizer.eos_token_id == num_ids
        out = engine.generate("Hello", {"temperature": 0, "max_new_tokens": 5, "logit_bias": {str(num_ids): 100.0}})
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": num_ids}


def test_invalid_tokenizer_is_a_value_error_of_the_start(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json' cannot be read by this version of tokenizers"):
        Engine(tmp_path, device="cpu")
