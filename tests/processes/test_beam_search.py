"""``beam_search`` on both faces: the outputs and scores of transformers; parameters; misuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

import aioengine
from aioengine import AsyncEngine, Engine
from aioengine.errors import RequestTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.process

PROMPT = "The capital of Italy is"


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(dtype="float32", max_total_tokens=4096, logprobs_mode="processed") as engine:
        yield engine


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(Path(aioengine.__file__).parent / "demo", dtype=torch.float32).eval()


@pytest.mark.parametrize(("width", "length", "penalty"), [(4, 12, 1.0), (2, 8, 0.0), (3, 10, 2.0)])
def test_it_finds_what_transformers_finds(
    llm: Engine, theirs: torch.nn.Module, width: int, length: int, penalty: float
) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    found = llm.beam_search(PROMPT, width, length, penalty)
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
    for answer, sequence, score in zip(found, sequences, expected.sequences_scores.tolist(), strict=True):
        num_tokens = len(answer["output_ids"])
        assert sequence[:num_tokens] == answer["output_ids"]
        assert set(sequence[num_tokens:]) <= {0}
        assert answer["meta_info"]["sequence_score"] == pytest.approx(score, abs=1e-4)
        assert answer["meta_info"]["completion_tokens"] == num_tokens
        is_stopped = answer["output_ids"][-1] in llm.tokenizer.eos_token_ids
        assert answer["meta_info"]["finish_reason"] == ("stop" if is_stopped else "length")
    assert found["text"] == [llm.tokenizer.decode(ids + answer["output_ids"])[len(PROMPT) :] for answer in found]


def test_parameters_of_the_distribution_act_where_logprobs_are_processed(llm: Engine) -> None:
    plain = llm.beam_search(PROMPT, 2, 6)
    word = plain[0]["text"].split()[0]
    without = llm.beam_search(llm.tokenizer.encode(PROMPT), 2, 6, bad_words=[word])
    assert all(answer["text"].split()[0] != word for answer in without)
    allowed = llm.beam_search(PROMPT, 2, 3, allowed_token_ids=[50, 60], ignore_eos=True)
    assert {token for answer in allowed for token in answer["output_ids"]} <= {50, 60}
    stopped = llm.beam_search(PROMPT, 2, 6, stop_token_ids=[plain[0]["output_ids"][1]], ignore_eos=False)
    assert any(answer["meta_info"]["finish_reason"]["matched"] == plain[0]["output_ids"][1] for answer in stopped)


async def test_both_faces_and_any_loop(llm: Engine) -> None:
    expected = llm.beam_search(PROMPT, 3, 5)
    found = await llm.async_beam_search(PROMPT, beam_width=3, max_new_tokens=5)
    async with AsyncEngine(dtype="float32", max_total_tokens=4096) as engine:
        of_async = await engine.async_beam_search(PROMPT, 3, 5)
        with pytest.raises(ValueError, match="takes 'temperature' where"):
            await engine.async_beam_search(PROMPT, temperature=0.5)
    assert found["output_ids"] == of_async["output_ids"] == expected["output_ids"]
    assert found["meta_info"]["sequence_score"] == sorted(expected["meta_info"]["sequence_score"], reverse=True)


def test_misuse_is_refused(llm: Engine) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.beam_search("")
    with pytest.raises(TypeError, match="one prompt"):
        llm.beam_search([[1, 2], [3]])  # type: ignore[list-item]
    with pytest.raises(RequestTooLargeError, match="max_new_tokens=100000"):
        llm.beam_search("a", max_new_tokens=100_000)
