"""Engines release their memory for other programs, and resume it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aioengine import AsyncEngine
from tests.kit.waiting import until
from tests.kit.weight_versions import ARGUMENTS, Reference, save_version
from tests.processes.weight_streams import kill_scheduler, started, until_tokens

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

PROMPT = list(range(20, 60))


def memory_of(engine: AsyncEngine) -> int:
    """Return the bytes of the scheduler process in memory."""
    pid = next(process["pid"] for process in engine.health()["processes"] if process["role"] == "scheduler")
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with about 35 MB of weights."""
    folder = tmp_path_factory.mktemp("model")
    save_version(folder, 0, hidden_size=512, intermediate_size=1536, num_attention_heads=8, initializer_range=0.05)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference({"default": folder})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(model_path=str(folder), **ARGUMENTS, enable_memory_saver=True) as engine:
        yield engine


async def test_requests_wait_until_memory_is_resumed(engine: AsyncEngine, folder: Path, reference: Reference) -> None:
    with pytest.raises(ValueError, match="tags entries must be"):
        await engine.release_memory_occupation("states")
    with pytest.raises(RuntimeError, match="the memory of weights is not released"):
        await engine.resume_memory_occupation("weights")
    task = started(engine, PROMPT, 100)
    await until_tokens(engine, 10)
    with pytest.raises(RuntimeError, match="1 request still running"):
        await engine.release_memory_occupation()
    assert await engine.pause_generation("retract")
    await engine.release_memory_occupation(["kv_cache", "weights"])
    with pytest.raises(RuntimeError, match="the memory of kv_cache is already released"):
        await engine.release_memory_occupation(["kv_cache"])
    await engine.release_memory_occupation("cuda_graph")
    update = await engine.update_weights_from_disk(folder)
    assert not update
    assert update.message == "the weights are released; call resume_memory_occupation first"
    with pytest.raises(ValueError, match="the weights are released"):
        await engine.get_weights_by_name("model.norm.weight")
    assert await engine.continue_generation()
    num_steps = engine.stats()["num_steps"]
    await engine.resume_memory_occupation("kv_cache")
    await asyncio.sleep(0.1)
    assert engine.stats()["num_steps"] == num_steps
    await engine.resume_memory_occupation(["weights", "cuda_graph"])
    answer = await task
    assert reference.check(PROMPT, answer) == ["default"]
    again = await started(engine, PROMPT, 100)
    assert again["output_ids"] == answer["output_ids"]
    assert again["meta_info"]["cached_tokens"] > 0


async def test_released_memory_is_free(engine: AsyncEngine, folder: Path) -> None:
    """The pool is 64 MiB, which a prompt fills partly."""
    await started(engine, PROMPT, 20)
    before = memory_of(engine)
    await engine.release_memory_occupation()
    assert memory_of(engine) < before - 20_000_000
    await engine.resume_memory_occupation()
    first = await started(engine, PROMPT, 20)
    assert await engine.update_weights_from_disk(folder, weight_version="default")
    assert (await started(engine, PROMPT, 20))["output_ids"] == first["output_ids"]


@pytest.mark.slow
async def test_new_process_starts_with_released_memory(engine: AsyncEngine, reference: Reference) -> None:
    await engine.release_memory_occupation()
    num_steps = engine.stats()["num_steps"]
    kill_scheduler(engine)
    await until(lambda: engine.stats()["num_restarts"] == 1)
    task = started(engine, PROMPT, 20)
    await until(lambda: engine.stats()["num_waiting"] == 1)
    assert engine.stats()["num_steps"] == num_steps
    await engine.resume_memory_occupation()
    assert reference.check(PROMPT, await task) == ["default"]
