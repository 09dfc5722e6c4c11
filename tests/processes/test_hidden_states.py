"""``return_hidden_states`` through the whole engine: answers, streams, samples, lost processes, misuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aioengine import AsyncEngine, Engine
from aioengine.errors import RequestTooLargeError
from tests.kit.processors import FORCE, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.process

PROMPT = "Once upon a time there was a small dragon who lived in a cave"
PARAMS = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(max_total_tokens=4096, max_hidden_state_bytes=400_000) as engine:
        yield engine


def states_of(piece: Any) -> list[np.ndarray]:
    return piece["meta_info"]["hidden_states"]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def test_whole_answers_streams_batches_and_samples_have_the_same(llm: Engine) -> None:
    answer = llm.generate(PROMPT, PARAMS, return_hidden_states=True)
    states = states_of(answer)
    assert [state.ndim for state in states] == [2, 1, 1, 1, 1, 1]
    assert len(states[0]) == answer["meta_info"]["prompt_tokens"]
    assert {(state.dtype, state.shape[-1]) for state in states} == {(np.dtype(np.float32), states[0].shape[1])}
    states[0][0] = 0.0  # they can be written to

    states = states_of(llm.generate(PROMPT, PARAMS, return_hidden_states=True))
    streamed: list[np.ndarray] = []
    for chunk in llm.generate(PROMPT, PARAMS, return_hidden_states=True, stream=True):
        assert len(states_of(chunk)) == len(chunk["output_ids"])
        streamed += states_of(chunk)
    assert same(streamed, states)

    batch = llm.generate([PROMPT] * 4, PARAMS, return_hidden_states=[True, False, "last", None])
    assert same(states_of(batch[0]), states)
    assert same(states_of(batch[2]), states[-1:])
    assert ["hidden_states" in row["meta_info"] for row in batch] == [True, False, True, False]
    assert batch["output_ids"] == [answer["output_ids"]] * 4
    samples = llm.generate(PROMPT, {**PARAMS, "n": 2}, return_hidden_states=True)
    assert all(same(states_of(sample), states) for sample in samples)


def test_the_last_one_comes_with_the_last_chunk_also_behind_a_stop(llm: Engine) -> None:
    whole = llm.generate(PROMPT, PARAMS, return_hidden_states=True)
    stop = llm.tokenizer.decode(whole["output_ids"][2:4])
    for params in (PARAMS, {**PARAMS, "stop": stop}, {**PARAMS, "stop_regex": stop[-1]}):
        found = [states_of(chunk) for chunk in llm.generate(PROMPT, params, return_hidden_states="last", stream=True)]
        answer = llm.generate(PROMPT, params, return_hidden_states="last")
        num_tokens = answer["meta_info"]["completion_tokens"]
        assert all(states == [] for states in found[:-1])
        last = states_of(whole)[num_tokens - 1]
        assert same(found[-1], [last[-1] if num_tokens == 1 else last])
        assert same(states_of(answer), found[-1])
        states = states_of(llm.generate(PROMPT, params, return_hidden_states=True))
        assert same(states, states_of(whole)[:num_tokens])


@pytest.mark.parametrize(
    ("value", "error"),
    [("first", ValueError), (1, ValueError), (["last", "x"], TypeError), ("LAST", ValueError)],
)
def test_misuse_is_refused_at_the_call(llm: Engine, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="return_hidden_states"):
        llm.generate(PROMPT, PARAMS, return_hidden_states=value)  # type: ignore[call-overload]


def test_more_than_allowed_is_refused_and_the_last_one_is_not(llm: Engine) -> None:
    params = {**PARAMS, "max_new_tokens": 600}
    with pytest.raises(RequestTooLargeError, match="max_hidden_state_bytes=400000 are allowed"):
        llm.generate(PROMPT, params, return_hidden_states=True)
    rows = llm.generate([PROMPT, PROMPT], [params, PARAMS], return_hidden_states=True, return_exceptions=True)
    assert isinstance(rows[0], RequestTooLargeError)
    assert len(states_of(rows[1])) == 6
    assert len(states_of(llm.generate(PROMPT, params, return_hidden_states="last"))) == 1


async def test_they_go_on_after_a_lost_scheduler(tmp_path: Path) -> None:
    async with AsyncEngine(logits_processors=NAMES, max_total_tokens=4096) as engine:

        async def ask(**custom: object) -> list[np.ndarray]:
            params = {**PARAMS, "custom_params": {"token": 50, **custom}}
            stream = engine.async_generate(
                PROMPT, params, stream=True, custom_logit_processor=FORCE, return_hidden_states=True
            )
            return [state async for chunk in stream for state in states_of(chunk)]

        disturbed = await ask(file=str(tmp_path / "killed"))
        assert engine.stats()["num_restarts"] == 1
        assert same(disturbed, await ask())
