"""Speculation of the whole engine on the demo model: the answers of the plain engine, also after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aioengine import AsyncEngine, Engine
from tests.kit.adapters import save_adapter
from tests.kit.waiting import until
from tests.processes.restart_kit import pid_of
from tests.processes.test_adapter_engine import demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.process

TEXT = "the cat sat on the mat and the dog sat on the cat. "
FEW = [70, 75, 80, 90, 100, 110]
SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"enum": ["first", "second"]}, "minItems": 4, "maxItems": 9}},
    "required": ["rows"],
    "additionalProperties": False,
}
SHARED: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True, "allowed_token_ids": FEW}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "drawn": ({"temperature": 0.4, "seed": 1}, {}),
    "penalties": ({"seed": 2, "temperature": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.05}, {}),
    "logprobs": ({"temperature": 0}, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    "states": ({"temperature": 0.4, "seed": 3}, {"return_hidden_states": True}),
    "samples": ({"temperature": 0.4, "seed": 4, "n": 3}, {}),
    "adapter": ({"temperature": 0}, {"lora_path": "one"}),
    "deadline": ({"temperature": 0}, {"timeout": 600.0}),
    "grammar": ({"seed": 5, "json_schema": SCHEMA, "allowed_token_ids": None, "ignore_eos": False}, {}),
}


def shape_of(engine: Engine | AsyncEngine, answer: Any) -> list[object]:
    """All of an answer that must not depend on drafts, with arrays as bytes."""
    answers = list(answer) if isinstance(answer, list) else [answer]
    keys = ("finish_reason", "output_token_logprobs", "output_top_logprobs", "input_token_logprobs")
    return [
        (
            one["text"],
            one["output_ids"],
            [one["meta_info"].get(key) for key in keys],
            [np.asarray(state).tobytes() for state in one["meta_info"].get("hidden_states", [])],
        )
        for one in answers
    ]


async def ask(engine: Engine | AsyncEngine, name: str) -> list[object]:
    params, options = REQUESTS[name]
    found = await engine.async_generate(3 * TEXT, {**SHARED, **params}, **options)
    return shape_of(engine, found)


async def ask_all(engine: Engine | AsyncEngine) -> dict[str, list[object]]:
    return dict(zip(REQUESTS, await asyncio.gather(*(ask(engine, name) for name in REQUESTS)), strict=True))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(demo_model(), tmp_path_factory.mktemp("adapter") / "one", r=4)


@pytest.fixture(scope="module")
def plain(adapter: Path) -> Iterator[Engine]:
    with Engine(lora_paths={"one": str(adapter)}) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(adapter: Path) -> Iterator[Engine]:
    with Engine(lora_paths={"one": str(adapter)}, speculative_algorithm="NGRAM") as engine:
        yield engine


async def test_answers_are_those_of_the_plain_engine(plain: Engine, engine: Engine) -> None:
    assert await ask_all(engine) == await ask_all(plain)
    assert engine.stats()["num_accepted_drafts"] > 50
    assert plain.stats()["num_proposed_drafts"] == 0


async def test_answers_are_the_same_when_the_scheduler_is_killed(plain: Engine, adapter: Path) -> None:
    alone = await ask_all(plain)
    async with AsyncEngine(
        lora_paths={"one": str(adapter)}, speculative_num_steps=3, speculative_algorithm="ngram"
    ) as engine:
        asked = asyncio.create_task(ask_all(engine))
        await until(lambda: engine.stats()["output_tokens"] > 60)
        os.kill(pid_of(engine, "scheduler"), signal.SIGKILL)
        assert await asked == alone
        assert engine.stats()["num_restarts"] == 1


@pytest.mark.parametrize("num_tokens", [2, 5, 13])
async def test_stops_inside_a_draft_end_the_answer_where_the_plain_engine_ends_it(
    plain: Engine, engine: Engine, num_tokens: int
) -> None:
    whole = await plain.async_generate(3 * TEXT, {**SHARED, "temperature": 0.4, "seed": 1})
    word, token_id = whole["text"][num_tokens : num_tokens + 3], whole["output_ids"][num_tokens]
    for stops in ({"stop": [word]}, {"stop_regex": word[:2] + "."}, {"stop_token_ids": [token_id]}):
        params = {**SHARED, "temperature": 0.4, "seed": 1, **stops, "ignore_eos": False}
        answers = [await one.async_generate(3 * TEXT, params) for one in (plain, engine)]
        assert shape_of(engine, answers[1]) == shape_of(plain, answers[0])
        info = answers[1]["meta_info"]
        assert info["spec_verify_ct"] + info["spec_num_correct_drafts"] == info["completion_tokens"]


async def test_finished_answers_count_their_drafts(plain: Engine, engine: Engine) -> None:
    answer = await engine.async_generate(3 * TEXT, {**SHARED, "temperature": 0, "logit_bias": {"70": 100}})
    info = answer["meta_info"]
    assert info["spec_num_correct_drafts"] > 20  # the same token again and again
    assert info["spec_verify_ct"] == 48 - info["spec_num_correct_drafts"]
    assert info["spec_accept_rate"] == info["spec_num_correct_drafts"] / info["spec_num_proposed_drafts"]
    assert info["spec_accept_length"] == 48 / info["spec_verify_ct"]
    chunks = [chunk async for chunk in engine.async_generate(3 * TEXT, {**SHARED, "temperature": 0}, stream=True)]
    assert [("spec_accept_rate" in chunk["meta_info"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "spec_accept_rate" not in (await plain.async_generate("x", {"max_new_tokens": 1}))["meta_info"]


async def test_turns_of_a_session_equal_those_of_the_plain_engine(plain: Engine, engine: Engine) -> None:
    turns: list[list[object]] = []
    for one in (plain, engine):
        session, rid = one.open_session(), None
        turns.append([])
        for turn in range(3):
            params = {**SHARED, "max_new_tokens": 30, "temperature": 0.3, "seed": turn}
            answer = await one.async_generate(TEXT, params, session_params={"id": session, "rid": rid})
            rid = answer["meta_info"]["id"]
            turns[-1] += shape_of(one, answer)
        one.close_session(session)
    assert turns[0] == turns[1]
