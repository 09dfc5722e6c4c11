"""The runner reports the version of its weights, and each chunk returns the version of its last token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from aioengine.api.engine import AsyncEngine
from aioengine.protocol.messages import Control, Reply
from aioengine.testing import fake_runner
from aioengine.testing.fake_engine import FakeSetup
from tests.kit.waiting import until
from tests.processes.restart_kit import frontend_of, until_restarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.api.answers import Answer
    from aioengine.protocol.messages import Progress
    from aioengine.settings.config import Settings

UPDATE = "update_weights"


class VersionedRunner:
    """A fake runner with weights of version "v1" and a control call that changes the version."""

    def __init__(self, inner: fake_runner.FakeRunner) -> None:
        self._inner = inner
        self._version = "v1"
        self._num_loads = 0
        self.controls = {UPDATE: self._update}

    @property
    def facts(self) -> dict[str, str | int | float | bool]:
        return {**self._inner.facts, "weight_version": self._version, "num_weight_loads": self._num_loads}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _update(self, control: Control) -> Reply:
        self._version = str(control.arguments["version"])
        self._num_loads += 1
        return Reply(control.call_id, True)


def build(settings: Settings, report: Callable[[Progress], None]) -> Any:
    return VersionedRunner(fake_runner.build(settings, report))


class VersionedSetup(FakeSetup, frozen=True, kw_only=True):
    def settings(self) -> Settings:
        settings = super().settings()
        runner = msgspec.structs.replace(settings.runner, factory=f"{__name__}:build")
        return msgspec.structs.replace(settings, runner=runner)


def engine_with_versions(**setup: Any) -> AsyncEngine:
    return AsyncEngine.from_blueprint(VersionedSetup(**setup).blueprint)


async def version_of(request: Any) -> str:
    answer: Answer = await request
    return answer["meta_info"]["weight_version"]


async def last_info(stream: Any) -> Any:
    return [chunk["meta_info"] async for chunk in stream][-1]


async def test_answers_and_chunks_have_the_version_of_the_runner() -> None:
    async with engine_with_versions() as engine:
        assert await version_of(engine.async_generate("a", {"max_new_tokens": 3})) == "v1"
        async for chunk in engine.async_generate("a", {"max_new_tokens": 3}, stream=True):
            assert chunk["meta_info"]["weight_version"] == "v1"
        assert (await engine.get_model_info())["weight_version"] == "v1"


async def test_chunks_after_an_update_have_the_new_version() -> None:
    async with engine_with_versions() as engine:
        stream = engine.async_generate("a", {"max_new_tokens": 1000}, stream=True)
        first = await anext(stream)
        assert first["meta_info"]["weight_version"] == "v1"
        assert (await frontend_of(engine).controls.ask(UPDATE, {"version": "v2"})).success
        assert await version_of(engine.async_generate("b", {"max_new_tokens": 3})) == "v2"
        last = await last_info(stream)
        spans = last["weight_versions"]
        assert [version for version, _, _ in spans] == ["v1", "v2"]
        assert spans[0][1:] == (0, spans[1][1])
        assert spans[1][2] == last["completion_tokens"] == 1000
        assert last["weight_version"] == "v2"


async def test_tokens_after_a_replacement_have_the_version_of_the_new_process() -> None:
    """Delivered tokens keep the version of the old process."""
    async with engine_with_versions() as engine:
        assert (await frontend_of(engine).controls.ask(UPDATE, {"version": "v2"})).success
        request = engine.async_generate("a", {"max_new_tokens": 1000}, stream=True)
        first = await anext(request)
        asking = asyncio.create_task(last_info(request))
        await until(lambda: engine.stats()["output_tokens"] > 0)
        frontend_of(engine).parts.processes._incarnation._launcher.children[0].kill()  # type: ignore[attr-defined]
        await until_restarted(engine, 1)
        spans = (await asking)["weight_versions"]
        assert first["meta_info"]["weight_version"] == "v2"
        assert [version for version, _, _ in spans] == ["v2", "v1"]
        assert await version_of(engine.async_generate("b", {"max_new_tokens": 3})) == "v1"


async def test_row_without_a_token_has_the_version_of_the_engine() -> None:
    async with engine_with_versions() as engine:
        assert (await engine.pause_generation("in_place")).success
        asking = asyncio.create_task(version_of(engine.async_generate("a", rid="waiting")))
        await until(lambda: engine.stats()["num_waiting"] == 1)
        engine.abort_request("waiting")
        assert await asking == "v1"
