"""``custom_logit_processor`` through the whole engine: calls, limits of time, lost processes, misuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aioengine import AsyncEngine, Engine
from aioengine.errors import RequestError
from tests.kit.processors import ADD, BROKEN, FORCE, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.process

PARAMS = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(logits_processors=NAMES, max_total_tokens=4096) as engine:
        yield engine


def forced(token: int, **params: object) -> dict[str, object]:
    return {**PARAMS, "custom_params": {"token": token, **params}}


def test_batches_streams_and_samples(llm: Engine) -> None:
    plain = llm.generate("Once upon a time", PARAMS)["output_ids"]
    answers = llm.generate(
        ["Once upon a time"] * 3, [forced(50), PARAMS, forced(60, bias=0)], custom_logit_processor=[FORCE, None, ADD]
    )
    assert answers["output_ids"] == [[50] * 8, plain, plain]
    chunks = llm.generate("a", forced(51), custom_logit_processor=FORCE, stream=True)
    assert [token for chunk in chunks for token in chunk["output_ids"]] == [51] * 8
    samples = llm.generate("a", {**forced(52), "n": 2, "temperature": 1}, custom_logit_processor=FORCE)
    assert [sample["output_ids"] for sample in samples] == [[52] * 8] * 2  # type: ignore[index]


def test_a_processor_that_does_not_end_fails_its_rows_alone(llm: Engine) -> None:
    looping = {**PARAMS, "custom_params": {"how": "loop"}}
    answers = llm.generate(
        ["a"] * 4,
        [looping, PARAMS, looping, PARAMS],
        custom_logit_processor=[BROKEN, BROKEN, BROKEN, None],
        return_exceptions=True,
    )
    for place in (0, 2):
        assert isinstance(answers[place], RequestError)
        assert "it took longer than 1 s" in str(answers[place])
    assert answers[1]["output_ids"] == [7] * 8
    assert answers[3]["output_ids"] == llm.generate("a", PARAMS)["output_ids"]
    assert llm.stats()["num_restarts"] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"custom_logit_processor": "os:system"}, ValueError, "'os:system' is not known: this engine allows tests.kit"),
        ({"custom_logit_processor": 5}, TypeError, "custom_logit_processor must be a string, got 5"),
        ({"custom_logit_processor": [FORCE]}, TypeError, "custom_logit_processor is a list, but there is one prompt"),
    ],
)
def test_misuse_is_refused_at_the_call(
    llm: Engine, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate("a", PARAMS, **options)  # type: ignore[call-overload]


async def test_it_goes_on_after_a_lost_scheduler(tmp_path: Path) -> None:
    async with AsyncEngine(logits_processors=",".join(NAMES), max_total_tokens=4096) as engine:
        with pytest.raises(ValueError, match="this engine allows"):
            engine.async_generate("a", PARAMS, custom_logit_processor="no.such:Class")
        params = [forced(50, file=str(tmp_path / "killed")), PARAMS]
        answers = await engine.async_generate(["a", "b"], params, custom_logit_processor=[FORCE, None])
        assert answers[0]["output_ids"] == [50] * 8
        assert engine.stats()["num_restarts"] == 1
        assert answers[1]["output_ids"] == (await engine.async_generate("b", PARAMS))["output_ids"]
