"""Adapters are named in calls, loaded, listed, unloaded, and refused with a reason."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aioengine.errors import EngineClosedError, RequestError, RequestTooLargeError
from aioengine.frontend.loaded_adapters import LoadedAdapters
from aioengine.testing.fake_engine import FakeSetup, fake_async_engine, fake_engine
from aioengine.testing.faults import Faults
from tests.kit.fake_adapters import write_adapter
from tests.kit.waiting import until
from tests.processes.restart_kit import pid_of
from tests.processes.test_fleet import fleet_engine

if TYPE_CHECKING:
    from aioengine.api.engine import AsyncEngine

pytestmark = pytest.mark.one_loop

PARAMS = {"max_new_tokens": 8, "temperature": 0}


def adapter_engine(**setup: object) -> AsyncEngine:
    return fake_async_engine(**{"max_loras_per_batch": 2, **setup})  # type: ignore[arg-type]


def registry(engine: AsyncEngine) -> LoadedAdapters:
    return engine._frontend_here().adapters


async def load(engine: AsyncEngine, folder: Path, *names: str, **options: bool) -> None:
    for name in names:
        result = await engine.load_lora_adapter(name, write_adapter(folder / name, sum(name.encode())), **options)
        assert result, result.error_message


async def texts_of(engine: AsyncEngine, lora_path: object, num_prompts: int = 3) -> list[str]:
    outs = await engine.async_generate(["Once upon a time"] * num_prompts, PARAMS, lora_path=lora_path)  # type: ignore[arg-type]
    return outs["text"]


async def test_rows_of_a_batch_name_their_adapters(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a", "b")
        base, a, b = [(await texts_of(engine, name, 1))[0] for name in (None, "a", "b")]
        assert len({base, a, b}) == 3
        assert await texts_of(engine, ["a", None, "b"]) == [a, base, b]
        assert await texts_of(engine, "b") == [b, b, b]
        outs = await engine.async_generate("Once upon a time", {**PARAMS, "n": 2}, lora_path="a")
        assert outs["text"] == [a, a]  # type: ignore[call-overload]


async def test_streams_chats_vectors_scores_and_sessions_accept_an_adapter(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        [text] = await texts_of(engine, "a", 1)
        stream = engine.async_generate("Once upon a time", PARAMS, stream=True, lora_path="a")
        assert "".join([chunk["text"] async for chunk in stream]) == text
        plain, other = [(await engine.async_encode("x", lora_path=name))["embedding"] for name in (None, "a")]
        assert (plain != other).any()
        scores = await engine.async_score("x", ["y", "y"], [97], lora_path=[None, "a"])
        assert len(scores) == 2
        session = await engine.open_session()
        for _ in range(2):
            await engine.async_generate("hi", PARAMS, session_params={"id": session}, lora_path="a")


async def test_adapters_and_their_loads_share_no_prefixes(tmp_path: Path) -> None:
    prompt = "Once upon a time there was a long prompt."

    async def num_cached(engine: AsyncEngine, name: str | None) -> int:
        out = await engine.async_generate(prompt, PARAMS, lora_path=name)
        return out["meta_info"]["cached_tokens"]

    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a", "b")
        for name in (None, "a", "b"):
            assert await num_cached(engine, name) == 0
            assert await num_cached(engine, name) > 0
        assert await engine.unload_lora_adapter("a")
        await load(engine, tmp_path, "a")
        assert await num_cached(engine, "a") == 0


async def test_names_that_are_not_loaded_are_refused_at_the_call(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "math")
        with pytest.raises(TypeError, match=r"lora_path must be a string, got \['math'\] of type list"):
            engine.async_generate(["x"], PARAMS, lora_path=[["math"]])  # type: ignore[list-item]
        for wrong in ("maths", ["math", "maths", None]):
            with pytest.raises(ValueError, match=r"'maths' is not loaded.*did you mean 'math'"):
                engine.async_generate(["x"] * 3, PARAMS, lora_path=wrong)
        unknown = [None, *(f"a{index}" for index in range(20))]
        with pytest.raises(ValueError, match="prompt 1: the adapter 'a0' is not loaded"):
            engine.async_generate(["x"] * 21, PARAMS, lora_path=unknown)
        with pytest.raises(ValueError, match="lora_path is empty"):
            engine.async_generate("x", PARAMS, lora_path="")
        with pytest.raises(TypeError, match="lora_path"):
            engine.async_generate("x", PARAMS, lora_path=7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="lora_path must be a string"):
            engine.async_generate(["x"] * 2, PARAMS, lora_path=np.array(["math", "math"]))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2 entries for 3 prompts"):
            engine.async_generate(["x"] * 3, PARAMS, lora_path=["math", None])
        with pytest.raises(TypeError, match="there is one prompt"):
            engine.async_generate("x", PARAMS, lora_path=["math"])
        assert engine.stats()["num_streams"] == 0
    async with fake_async_engine() as plain:
        with pytest.raises(ValueError, match="serves no LoRA adapters"):
            plain.async_generate("x", PARAMS, lora_path="a")
        assert (await plain.async_generate(["x"], PARAMS, lora_path=[None]))["text"]
        for result in (await plain.load_lora_adapter("a", "b"), await plain.unload_lora_adapter("a")):
            assert not result
            assert "lora_paths" in result.error_message
        assert not await plain.list_lora_adapters()


async def test_loading_a_bad_adapter_returns_the_reason(tmp_path: Path) -> None:
    wrong = {
        "is no folder": tmp_path / "nothing",
        "not finite": write_adapter(tmp_path / "nan", value=float("nan")),
        "rank 65": write_adapter(tmp_path / "rank", rank=65),
        "no such layer": write_adapter(tmp_path / "layer", layers={"model.layers.9.self_attn.q_proj": (8, 8)}),
        "has shape": write_adapter(tmp_path / "shape", layers={"model.layers.0.self_attn.q_proj": (8, 4)}),
        "use_dora": write_adapter(tmp_path / "dora", config={"use_dora": True}),
    }
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        for words, folder in wrong.items():
            result = await engine.load_lora_adapter("wrong", folder)
            assert not result
            assert words in result.error_message
            assert result.loaded_adapters == {"a": str(tmp_path / "a")}
        again = await engine.load_lora_adapter("a", tmp_path / "a")
        assert "loaded already" in again.error_message
        unknown = await engine.unload_lora_adapter("b")
        assert "'b' is not loaded" in unknown.error_message
        with pytest.raises(ValueError, match="lora_path is empty"):
            await engine.load_lora_adapter("name", "")
        with pytest.raises(TypeError, match="lora_name"):
            await engine.load_lora_adapter(None, "x")  # type: ignore[arg-type]
        assert (await texts_of(engine, "a", 1))[0]


async def test_loading_a_relative_folder_without_a_working_directory_returns_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    async with adapter_engine() as engine:
        monkeypatch.chdir(gone)
        gone.rmdir()
        result = await engine.load_lora_adapter("a", "adapters/a")
        assert not result
        assert "the folder 'adapters/a' cannot be found: FileNotFoundError" in result.error_message
        await load(engine, tmp_path, "a")


async def test_removed_or_changed_folder_fails_only_the_requests_of_its_adapter(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    async with adapter_engine(max_loaded_loras=2, max_loras_per_batch=1) as engine:
        await load(engine, tmp_path, *names)
        shutil.rmtree(tmp_path / "a")
        write_adapter(tmp_path / "b", 9)
        results = await asyncio.gather(*(texts_of(engine, name, 1) for name in names), return_exceptions=True)
        for result, words in ((results[0], "was removed"), (results[1], "have changed")):
            assert isinstance(result, RequestError)
            assert result.stage == "adapter"
            assert words in result.cause
        assert all(isinstance(result, list) for result in results[2:])
        write_adapter(tmp_path / "b", 9)
        assert await engine.unload_lora_adapter("b")
        assert await engine.load_lora_adapter("b", tmp_path / "b")
        assert await texts_of(engine, "b", 1)


async def test_unloading_refuses_new_calls_and_waits_for_running_ones(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        stream = engine.async_generate("x", {"max_new_tokens": 1000}, stream=True, lora_path="a")
        await anext(stream)
        unloading = asyncio.create_task(engine.unload_lora_adapter("a"))
        await until(lambda: not registry(engine).list().loaded_adapters)
        with pytest.raises(ValueError, match="'a' is being unloaded$"):
            engine.async_generate("x", lora_path="a")
        assert "is being unloaded" in (await engine.unload_lora_adapter("a")).error_message
        assert "loaded already" in (await engine.load_lora_adapter("a", tmp_path / "a")).error_message
        assert not unloading.done()
        await stream.aclose()
        assert await unloading
        with pytest.raises(ValueError, match="is not loaded"):
            engine.async_generate("x", lora_path="a")


async def test_an_unload_that_is_cancelled_or_too_late_leaves_the_adapter_loaded(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        stream = engine.async_generate("x", {"max_new_tokens": 1000}, stream=True, lora_path="a")
        await anext(stream)
        late = await engine.unload_lora_adapter("a", timeout=0.01)
        assert "was still used by 1 call after" in late.error_message
        unloading = asyncio.create_task(engine.unload_lora_adapter("a"))
        await until(lambda: not registry(engine).list().loaded_adapters)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert await texts_of(engine, "a", 1)
        await stream.aclose()
        assert await engine.unload_lora_adapter("a")


async def test_failed_calls_release_their_adapter(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        stream = engine.async_generate("x", {"max_new_tokens": 1000}, stream=True, rid="mine")
        with pytest.raises(ValueError, match="'mine' is in use"):
            engine.async_generate("x", rid="mine", lora_path="a")
        with pytest.raises(RequestTooLargeError):
            await engine.async_generate("x" * 3000, PARAMS, lora_path="a")
        assert await engine.unload_lora_adapter("a", timeout=5)
        await stream.aclose()


async def test_concurrent_loads_of_a_name_and_a_shutdown_end(tmp_path: Path) -> None:
    engine = adapter_engine()
    async with engine:
        folder = write_adapter(tmp_path / "a")
        results = await asyncio.gather(*(engine.load_lora_adapter("a", folder) for _ in range(3)))
        assert sorted(map(bool, results)) == [False, False, True]
        loading = asyncio.create_task(engine.load_lora_adapter("b", folder))
        await asyncio.sleep(0)
        assert "'b' is being loaded" in (await engine.load_lora_adapter("b", folder)).error_message
        stream = engine.async_generate("x", {"max_new_tokens": 1000}, stream=True, lora_path="a")
        await anext(stream)
        unloading = asyncio.create_task(engine.unload_lora_adapter("a"))
        await asyncio.sleep(0)
    results = await asyncio.gather(loading, unloading, return_exceptions=True)
    assert all(result or isinstance(result, EngineClosedError) for result in results)


async def test_pinned_adapters_are_limited_and_stay_loaded(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a", pinned=True)
        second = await engine.load_lora_adapter("b", write_adapter(tmp_path / "b", 1), pinned=True)
        assert "max_loras_per_batch=2 leaves no place" in second.error_message
        await load(engine, tmp_path, "b", "c")
        for name in ("b", "c", "a", "b"):
            assert await texts_of(engine, name, 1)
        assert await engine.unload_lora_adapter("a")
        assert await engine.load_lora_adapter("a", tmp_path / "a", pinned=True)


def test_synchronous_engine_has_the_same_calls(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    with fake_engine(max_loras_per_batch=2) as engine:
        assert engine.load_lora_adapter("a", str(folder)).loaded_adapters == {"a": str(folder)}
        assert engine.generate("x", PARAMS, lora_path="a")["text"] != engine.generate("x", PARAMS)["text"]
        assert engine.list_lora_adapters().loaded_adapters == {"a": str(folder)}
        assert engine.unload_lora_adapter("a").loaded_adapters == {}


async def test_beams_use_an_adapter(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        results = [await engine.async_beam_search("x", 2, 4, lora_path=name) for name in (None, "a")]
        assert results[0]["text"] != results[1]["text"]


async def test_an_unload_waits_for_all_steps_of_a_beam_search(tmp_path: Path) -> None:
    async with adapter_engine() as engine:
        await load(engine, tmp_path, "a")
        expected = await engine.async_beam_search("x", 2, 16, lora_path="a")
        searching = asyncio.create_task(engine.async_beam_search("x", 2, 16, lora_path="a"))
        await until(lambda: engine.stats()["num_streams"] > 0)
        unloading = asyncio.create_task(engine.unload_lora_adapter("a"))
        await until(lambda: not registry(engine).list().loaded_adapters)
        with pytest.raises(ValueError, match="is being unloaded"):
            await engine.async_beam_search("x", 2, 4, lora_path="a")
        assert (await searching)["text"] == expected["text"]
        assert await unloading


@pytest.mark.process
async def test_load_fails_if_the_scheduler_is_lost(tmp_path: Path) -> None:
    async with adapter_engine(processes=True, adapter_s=0.1) as engine:
        scheduler = pid_of(engine, "scheduler")
        os.kill(scheduler, signal.SIGSTOP)  # so that it dies before it answers
        path = write_adapter(tmp_path / "a")
        loading = asyncio.create_task(engine.load_lora_adapter("a", path, pinned=True))
        await until(lambda: registry(engine)._controls._waiting)
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(RequestError) as lost:
            await loading
        assert lost.value.stage == "crash"
        assert await engine.load_lora_adapter("a", path, pinned=True)
        assert engine.stats()["num_restarts"] == 1
        assert (await texts_of(engine, "a", 1))[0]


@pytest.mark.process
async def test_replicas_load_adapters_on_demand(tmp_path: Path) -> None:
    setup = FakeSetup(max_loras_per_batch=2, step_time_s=0.001)
    async with fleet_engine(setup, setup) as engine:
        await load(engine, tmp_path, "a", pinned=True)
        await load(engine, tmp_path, "b", "c")
        names = ["a", None, "b", "c"] * 4
        calls = [asyncio.create_task(texts_of(engine, name, 1)) for name in names]
        await until(lambda: engine.stats()["output_tokens"] > 0)
        os.kill(engine.health()["processes"][0]["pid"], signal.SIGKILL)
        texts = [text for [text] in await asyncio.gather(*calls)]
        assert texts == texts[:4] * 4
        assert len(set(texts)) == 4
        assert await engine.unload_lora_adapter("a")


@pytest.mark.process
async def test_requests_and_adapters_survive_a_lost_scheduler(tmp_path: Path) -> None:
    faults = Faults(kill_at=30, once=str(tmp_path / "once"))
    names = [*"abcdef"]
    async with adapter_engine(faults=faults, max_loras_per_batch=2, step_time_s=0.001) as engine:
        await load(engine, tmp_path, "a", pinned=True)
        await load(engine, tmp_path, *names[1:])
        calls = [texts_of(engine, [name, None], 2) for name in names for _ in range(4)]
        results = await asyncio.gather(*calls)
        assert engine.stats()["num_restarts"] == 1
        assert len({tuple(result) for result in results}) == len(names)
        assert (await engine.list_lora_adapters()).loaded_adapters.keys() == {*names}
        assert await texts_of(engine, "f", 1)
