"""Extras of a runner are delivered exactly once together with their tokens, also if processes are lost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aioengine.api.answers import Answer, Chunk
from aioengine.api.engine import AsyncEngine
from aioengine.protocol.columns import NO_TOKEN, POOLED_VECTOR, Extra
from aioengine.protocol.messages import FinishCode, Limits, RequestKind, Sampling, Submit, TextChunks, TextRules
from aioengine.settings.config import Settings
from aioengine.testing.fake_engine import FakeSetup
from aioengine.testing.fake_runner import extra_of
from aioengine.testing.faults import Faults
from tests.kit.fake_reference import reference_vector
from tests.processes.engine_kit import Frontend

pytestmark = pytest.mark.one_loop

PARAMS = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5, "stop": "qzqz"}


class ExtrasSetup(FakeSetup, frozen=True, kw_only=True):
    """A fake engine whose runner returns extras, and any number of tokens per step."""

    tokens_per_step: str = "1"

    def settings(self) -> Settings:
        settings = super().settings()
        options = {**settings.runner.options, "gives_extras": True, "tokens_per_step": self.tokens_per_step}
        return msgspec.structs.replace(settings, runner=msgspec.structs.replace(settings.runner, options=options))


def engine_of(tokens_per_step: str = "1", faults: Faults | None = None) -> AsyncEngine:
    return AsyncEngine.from_blueprint(ExtrasSetup(tokens_per_step=tokens_per_step, faults=faults).blueprint)


def check(piece: Answer | Chunk, offset: int = 0) -> None:
    """Check that the piece has one extra per token."""
    extras = {extra.index: extra.data for extra in piece.get("extras", [])}
    assert len(extras) == len(piece.get("extras", []))
    assert extras == {
        index: extra_of(0, index, token_id).data for index, token_id in enumerate(piece["output_ids"], offset)
    }


@pytest.mark.parametrize("tokens_per_step", ["1", "2", "3121"])
async def test_extras_come_with_their_tokens(tokens_per_step: str) -> None:
    async with engine_of(tokens_per_step) as engine:
        whole = await engine.async_generate("a story", PARAMS)
        assert len(whole["output_ids"]) == 40
        check(whole)
        ids: list[int] = []
        async for chunk in engine.async_generate("a story", PARAMS, stream=True):
            check(chunk, len(ids))
            ids += chunk["output_ids"]
        assert ids == whole["output_ids"]


async def test_an_answer_without_extras_has_no_such_key() -> None:
    async with AsyncEngine.from_blueprint(FakeSetup().blueprint) as engine:
        assert "extras" not in await engine.async_generate("a story", PARAMS)
        async for chunk in engine.async_generate("a story", PARAMS, stream=True):
            assert "extras" not in chunk


async def test_new_reader_gets_the_extras_of_its_chunks() -> None:
    async with engine_of() as engine:
        stream = engine.async_generate("a story", PARAMS, stream=True, rid="mine", resume_ttl=60)
        read = await anext(stream)
        await stream.aclose()
        async for chunk in engine.attach("mine", from_offset=len(read["text"])):
            check(chunk, chunk["token_offset"])
        async for chunk in engine.attach("mine"):
            check(chunk, chunk["token_offset"])


@pytest.mark.process
@pytest.mark.parametrize("tokens_per_step", ["1", "12"])
async def test_extras_survive_a_lost_scheduler(tokens_per_step: str, tmp_path: Path) -> None:
    async with engine_of(tokens_per_step) as undisturbed:
        expected = await undisturbed.async_generate("a story", PARAMS)
    faults = Faults(kill_at=11, once=str(tmp_path / "once"))
    async with engine_of(tokens_per_step, faults) as engine:
        ids: list[int] = []
        async for chunk in engine.async_generate("a story", PARAMS, stream=True):
            check(chunk, len(ids))
            ids += chunk["output_ids"]
        assert engine.stats()["num_restarts"] == 1
    assert ids == expected["output_ids"]


@pytest.mark.parametrize("num_losses", [0, 1])
async def test_the_vector_of_a_pooled_request_reaches_the_frontend(num_losses: int) -> None:
    async with Frontend(launcher="inline", max_restarts=1) as frontend:
        for _ in range(num_losses):
            frontend.supervisor._incarnation._launcher.children[0].kill()  # type: ignore[attr-defined]
        prompt = list(range(300))
        frontend.supervisor.send(
            [Submit(7, prompt, Sampling(seed=0), Limits(0), TextRules(stream=False), kind=RequestKind.POOL)]
        )
        assert (await frontend.finished(7)).code is FinishCode.STOP
        extras = [
            extra for message in frontend.heard if isinstance(message, TextChunks) for extra in message.tokens.extras
        ]
        assert extras == [Extra(7, NO_TOKEN, POOLED_VECTOR, reference_vector(prompt))]
