"""Rows with large messages are started over many iterations of the loop, in order and each once."""

from __future__ import annotations

import asyncio

import pytest

from aioengine.errors import EngineDeadError
from aioengine.frontend.intake import submitter
from aioengine.protocol.messages import Submit
from aioengine.supervision.incarnation import Incarnation
from aioengine.testing.fake_engine import fake_async_engine

pytestmark = pytest.mark.one_loop

NUM_SAMPLES = 64
STOPS = [f"{number:04}" * 1000 for number in range(32)]
LARGE = {"n": NUM_SAMPLES, "stop": STOPS, "max_new_tokens": 3, "temperature": 1}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Submit]]:
    """Record the rows of each frame."""
    frames: list[list[Submit]] = []
    plain = Incarnation._flush

    def flush(own: Incarnation) -> None:
        if submits := [message for message in own._unsent if isinstance(message, Submit)]:
            frames.append(submits)
        plain(own)

    monkeypatch.setattr(Incarnation, "_flush", flush)
    return frames


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_samples_with_large_stop_strings_are_started_in_parts(
    sent: list[list[Submit]], prompt: str | list[str]
) -> None:
    async with fake_async_engine(processes=False) as engine:
        answers = await engine.async_generate(prompt, LARGE)
        small = await engine.async_generate(prompt, {**LARGE, "stop": None, "seed": 1})
    num_rows = NUM_SAMPLES * len(prompt)
    assert len(list(answers)) == len(list(small)) == num_rows
    parts = sent[:-1] if prompt == "a" else [part for part in sent if part[0].text.stop]
    assert [submit.uid for part in parts for submit in part] == list(range(num_rows))
    for part in parts:
        assert sum(map(submitter._size, part[:-1])) < submitter.MAX_BYTES_AT_ONCE


async def test_samples_with_large_grammars_are_started_in_parts(sent: list[list[Submit]]) -> None:
    choices = [chr(0x4E00 + number) * 13 for number in range(10_000)]
    async with fake_async_engine(processes=False) as engine:
        outs = await engine.async_generate(["a"] * 30, {"choice": choices}, return_exceptions=True)
    assert len(outs) == 30
    for part in sent:
        assert sum(map(submitter._size, part[:-1])) < submitter.MAX_BYTES_AT_ONCE
    assert max(len(part) for part in sent) < 10


async def test_samples_of_a_long_prompt_are_started_in_parts(
    sent: list[list[Submit]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter, "MAX_BYTES_AT_ONCE", 4000)
    async with fake_async_engine(processes=False) as engine:
        answers = await engine.async_generate(input_ids=[7] * 300, sampling_params={"n": 20, "max_new_tokens": 3})
    assert len(list(answers)) == 20
    assert [len(part) for part in sent] == [4] * 5


async def test_many_samples_of_a_prompt_are_started_in_parts(sent: list[list[Submit]]) -> None:
    async with fake_async_engine(processes=False, max_running=50) as engine:
        answers = await engine.async_generate("a", {"n": 300, "max_new_tokens": 30})
    assert len(list(answers)) == 300
    parts = [len(part) for part in sent]
    assert parts[:2] == [submitter.MAX_ROWS_AT_ONCE, 2 * 50 - submitter.MAX_ROWS_AT_ONCE]
    assert sum(parts) == 300
    assert max(parts) <= submitter.MAX_ROWS_AT_ONCE


async def test_samples_started_in_parts_have_consecutive_seeds(
    sent: list[list[Submit]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter, "MAX_BYTES_AT_ONCE", 4000)
    async with fake_async_engine(processes=False) as engine:
        params = {"n": 20, "max_new_tokens": 3, "temperature": 1}
        calls = [engine.async_generate(input_ids=[token_id] * 300, sampling_params=params) for token_id in (7, 8)]
        await asyncio.gather(*calls)
    submits = [submit for part in sent for submit in part]
    prompts = [submit.prompt_token_ids[0] for submit in submits]
    assert prompts not in (sorted(prompts), sorted(prompts, reverse=True))  # the calls start in turns
    seeds = {token_id: [s.sampling.seed for s in submits if s.prompt_token_ids[0] == token_id] for token_id in (7, 8)}
    for own in seeds.values():
        assert own == list(range(own[0], own[0] + 20))
    assert seeds[7][0] != seeds[8][0]


@pytest.mark.parametrize(("num_ids", "parts"), [(300, [1, 9]), (30, [10])])
async def test_first_of_several_long_scored_prompts_starts_alone(
    sent: list[list[Submit]], num_ids: int, parts: list[int]
) -> None:
    async with fake_async_engine(processes=False) as engine:
        result = await engine.async_score([7] * num_ids, [[item] for item in range(10)], [11, 12])
    assert len(result) == 10
    assert [len(part) for part in sent] == parts
    assert [submit.prompt_token_ids[-1] for part in sent for submit in part] == list(range(10))


@pytest.mark.parametrize("ends_by", ["abort", "timeout", "death"])
async def test_partly_started_call_ends_completely(monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    monkeypatch.setattr(submitter, "MAX_BYTES_AT_ONCE", 1)
    async with fake_async_engine(processes=False) as engine:
        params = {"n": 500, "max_new_tokens": 300}
        stream = engine.async_generate("a", params, timeout=0.02 if ends_by == "timeout" else None)
        answers = asyncio.ensure_future(stream)
        for _ in range(10):
            await asyncio.sleep(0)
        if ends_by == "abort":
            engine.abort_request(abort_all=True)
        if ends_by == "death":
            engine._frontend_here().fail(EngineDeadError("it died"))
            with pytest.raises(EngineDeadError):
                await answers
            return
        answers_of_rows = list(await answers)
        assert len(answers_of_rows) == 500
        reason = {"abort": "abort", "timeout": "deadline"}[ends_by]
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers_of_rows} == {reason}
