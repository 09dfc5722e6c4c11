"""``input_embeds`` through the whole engine: the answers of the ids whose embeddings they are; misuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import aioengine
from aioengine import AsyncEngine, Engine
from aioengine.errors import RequestTooLargeError
from tests.kit.processors import FORCE, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process

PROMPTS = ["Once upon a time there was a small dragon who lived in a cave", "The capital of Italy is"]
PARAMS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
MANY = np.zeros((4, 256), np.float32)


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(max_total_tokens=4096, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """[V, D], the embeddings of the demo model."""
    [file] = (Path(aioengine.__file__).parent / "demo").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor("model.embed_tokens.weight").float()


@pytest.fixture(scope="module")
def embeds(llm: Engine, table: torch.Tensor) -> list[np.ndarray]:
    return [table[llm.tokenizer.encode(prompt)].numpy() for prompt in PROMPTS]


def test_they_give_the_answers_of_their_ids(llm: Engine, embeds: list[np.ndarray]) -> None:
    expected = llm.generate(PROMPTS, PARAMS)
    forms: list[Any] = [
        embeds,
        [each.astype(np.float64) for each in embeds],
        [torch.from_numpy(each) for each in embeds],
    ]
    for form in [*forms, [each.tolist() for each in embeds]]:
        batch = llm.generate(input_embeds=form, sampling_params=PARAMS)
        assert batch["output_ids"] == expected["output_ids"]
        assert batch["meta_info"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    three = llm.generate(input_embeds=np.stack([embeds[1], embeds[1]]), sampling_params=PARAMS)
    assert [row["output_ids"] for row in three] == [expected[1]["output_ids"]] * 2  # type: ignore[index]
    for one in (embeds[0], torch.from_numpy(embeds[0]), embeds[0].tolist(), list(embeds[0])):
        answer = llm.generate(input_embeds=one, sampling_params=PARAMS)
        assert answer["output_ids"] == expected[0]["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == 0


def test_streams_samples_and_the_options_of_a_call(llm: Engine, embeds: list[np.ndarray]) -> None:
    expected = llm.generate(PROMPTS[0], PARAMS, return_logprob=True, top_logprobs_num=2)
    chunks = llm.generate(input_embeds=embeds[0], sampling_params=PARAMS, stream=True)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == expected["output_ids"]
    found = llm.generate(input_embeds=embeds[0], sampling_params=PARAMS, return_logprob=True, top_logprobs_num=2)
    for key in ("output_token_logprobs", "output_top_logprobs"):
        assert found["meta_info"][key] == expected["meta_info"][key]  # type: ignore[literal-required]
    params = {**PARAMS, "n": 3, "temperature": 1, "seed": 5}
    samples, by_ids = llm.generate(input_embeds=embeds[0], sampling_params=params), llm.generate(PROMPTS[0], params)
    assert [each["output_ids"] for each in samples] == [each["output_ids"] for each in by_ids]  # type: ignore[index]
    end = llm.generate(input_ids=llm.tokenizer.encode(PROMPTS[0])[-5:], sampling_params=PARAMS)
    cut = llm.generate(input_embeds=embeds[0], sampling_params=PARAMS, truncate_prompt_tokens=5)
    assert cut["output_ids"] == end["output_ids"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_embeds": MANY, "prompt": "a"}, ValueError, "input_embeds is given beside a prompt"),
        ({"input_embeds": MANY, "input_ids": [1]}, ValueError, "input_embeds is given beside a prompt"),
        ({"input_embeds": []}, ValueError, "none of them empty"),
        ({"input_embeds": np.zeros((0, 256))}, ValueError, "none of them empty"),
        ({"input_embeds": "abc"}, TypeError, "input_embeds must be a float array"),
        ({"input_embeds": 5}, TypeError, "input_embeds must be a float array"),
        ({"input_embeds": [1, 2]}, TypeError, "input_embeds must be a float array .* got an array of int64"),
        ({"input_embeds": [0.5, 0.5]}, ValueError, r"got the shape \[2\]"),
        ({"input_embeds": MANY.astype(int)}, TypeError, "got an array of int64"),
        ({"input_embeds": [[1.0, 2.0], [1.0]]}, TypeError, "cannot be made one"),
        ({"input_embeds": MANY * np.nan}, ValueError, "must have finite numbers"),
        ({"input_embeds": MANY.astype(np.float64) + 1e300}, ValueError, "must have finite numbers"),
        ({"input_embeds": MANY[:, :100]}, ValueError, "embeddings of 100 numbers; those of this model have 256"),
        ({"input_embeds": [MANY, MANY[:, :100]]}, ValueError, "embeddings of 100 numbers"),
        ({"input_embeds": MANY, "return_prompt_token_ids": True}, ValueError, "return_prompt_token_ids is for prompts"),
        ({"input_embeds": MANY, "add_special_tokens": True}, ValueError, "add_special_tokens=True is for text"),
        (
            {"input_embeds": MANY, "return_logprob": True, "logprob_start_len": 0},
            ValueError,
            "logprob_start_len is for",
        ),
        ({"input_embeds": np.zeros((5000, 256))}, RequestTooLargeError, "5000 tokens"),
    ],
)
def test_misuse_is_refused(llm: Engine, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(**options)


def test_a_row_that_is_wrong_fails_alone(llm: Engine, embeds: list[np.ndarray]) -> None:
    rows = llm.generate(
        input_embeds=[embeds[0], MANY * np.nan, MANY[:, :9], embeds[1]], sampling_params=PARAMS, return_exceptions=True
    )
    assert [isinstance(row, ValueError) for row in rows] == [False, True, True, False]


async def test_they_go_on_after_a_lost_scheduler(tmp_path: Path, embeds: list[np.ndarray], llm: Engine) -> None:
    async with AsyncEngine(logits_processors=NAMES, max_total_tokens=4096, dtype="float32") as engine:
        killer = {**PARAMS, "custom_params": {"token": 50, "file": str(tmp_path / "killed")}}
        lost = engine.async_generate("a", killer, custom_logit_processor=FORCE)
        answer = await engine.async_generate(input_embeds=embeds[0], sampling_params=PARAMS)
        await lost
        assert engine.stats()["num_restarts"] == 1
    assert answer["output_ids"] == llm.generate(PROMPTS[0], PARAMS)["output_ids"]
