"""Streams of an engine that gets new weights."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

from aioengine import AsyncEngine
from tests.kit.waiting import until
from tests.kit.weight_versions import ARGUMENTS, GREEDY

if TYPE_CHECKING:
    from pathlib import Path

live = pytest.mark.asyncio(loop_scope="module")
"""The mark of tests with the fixture ``engine`` of conftest.py."""

PROMPT = [5, 9, 200, 31, 7]
PROMPTS = [PROMPT, [1, 2, 3], list(range(20, 60))]


def engine_of(versions: dict[str, Path], **options: Any) -> AsyncEngine:
    """Return an engine with the version "default". versions: as of the fixture."""
    return AsyncEngine(model_path=str(versions["default"]), **ARGUMENTS, **options)


_before: WeakKeyDictionary[AsyncEngine, dict[str, int]] = WeakKeyDictionary()


async def begin(engine: AsyncEngine, versions: dict[str, Path]) -> None:
    """Load the version "default" into an engine of another test, and count from 0."""
    assert await engine.update_weights_from_disk(versions["default"], weight_version="default")
    _before[engine] = {name: value for name, value in engine.stats().items() if isinstance(value, int)}


def total(engine: AsyncEngine, name: str) -> int:
    """Return a total of ``stats`` since the test began."""
    count: int = engine.stats()[name]
    return count - _before.get(engine, {}).get(name, 0)


async def collect(stream: Any) -> Any:
    """Return the chunks of a stream as one answer. Each chunk must have the version of its last token."""
    ids: list[int] = []
    logprobs: list[Any] = []
    versions: list[tuple[int, str]] = []
    info: Any = {}
    async for chunk in stream:
        info = chunk["meta_info"]
        ids += chunk["output_ids"]
        logprobs += info.get("output_token_logprobs", [])
        if chunk["output_ids"]:
            versions.append((len(ids) - 1, info["weight_version"]))
    by_token = [version for version, start, stop in info["weight_versions"] for _ in range(start, stop)]
    assert len(by_token) == len(ids)
    assert versions == [(last, by_token[last]) for last, _ in versions]
    return {"output_ids": ids, "meta_info": {**info, "output_token_logprobs": logprobs}}


def started(engine: AsyncEngine, prompt: list[int], count: int, **options: Any) -> asyncio.Task[Any]:
    """Start a stream that delivers every token alone."""
    stream = engine.async_generate(
        input_ids=prompt,
        sampling_params={**GREEDY, "max_new_tokens": count},
        stream=True,
        return_logprob=True,
        **options,
    )
    return asyncio.create_task(collect(stream))


async def until_tokens(engine: AsyncEngine, count: int) -> None:
    await until(lambda: total(engine, "output_tokens") >= count)


def kill_scheduler(engine: AsyncEngine) -> None:
    for process in engine.health()["processes"]:
        if process["role"] == "scheduler":
            os.kill(process["pid"], signal.SIGKILL)
