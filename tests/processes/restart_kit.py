"""Requests for engines with losses, and the answers of an engine without losses."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.api.engine import AsyncEngine
    from aioengine.api.sync import Engine
    from aioengine.frontend.frontend import Frontend as EngineFrontend

ROLES = ["scheduler", "detokenizer"]
ANSWERS = {"story": "Once 🥖 upon a time there was \u6771\u4eac, and the END came soon. Or did it?"}

PARAMS: dict[str, Mapping[str, object]] = {
    "plain": {"max_new_tokens": 60},
    "seeded": {"max_new_tokens": 60, "temperature": 1.0, "seed": 7},
    "stop": {"max_new_tokens": 60, "stop": ["the END came", "soon. Or not"]},
    "held": {"max_new_tokens": 60, "stop": ["there was nothing at all here", "Once upon"]},
    "regex": {"max_new_tokens": 60, "stop_regex": r"E\w+ came s[a-o]+n"},
    "kept": {"max_new_tokens": 60, "stop": ["END"], "no_stop_trim": True},
    "least": {"max_new_tokens": 60, "min_new_tokens": 30, "stop_token_ids": [ord("e")]},
    "samples": {"max_new_tokens": 40, "n": 3, "temperature": 1.0, "seed": 3},
}
"""Parameters of requests that run at the same time."""

Rows = list[tuple[str, list[int], object]]
Outcome = dict[str, Rows]


async def ask(engine: AsyncEngine, name: str, *, stream: bool) -> Rows:
    return await rows_of(engine, "a story, please", {"temperature": 0, **PARAMS[name]}, stream=stream)


async def rows_of(engine: Engine | AsyncEngine, prompt: str, params: Mapping[str, object], *, stream: bool) -> Rows:
    """Return text, ids and finish reason of each row. The offsets of chunks must have no gap."""
    if not stream:
        answer = await engine.async_generate(prompt, params)
        answers = list(answer) if isinstance(answer, list) else [answer]
        return [(answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]) for answer in answers]
    rows: dict[int, tuple[str, list[int], object]] = {}
    async for chunk in engine.async_generate(prompt, params, stream=True):
        text, ids, reason = rows.get(chunk.get("index", 0), ("", [], None))
        assert (chunk["text_offset"], chunk["token_offset"]) == (len(text), len(ids))
        assert reason is None
        ids = ids + chunk["output_ids"]
        assert chunk["meta_info"]["completion_tokens"] == len(ids)
        rows[chunk.get("index", 0)] = (text + chunk["text"], ids, chunk["meta_info"]["finish_reason"])
    return [rows[index] for index in sorted(rows)]


async def ask_all(engine: AsyncEngine, *, stream: bool) -> Outcome:
    rows = await asyncio.gather(*(ask(engine, name, stream=stream) for name in PARAMS))
    return dict(zip(PARAMS, rows, strict=True))


_undisturbed: dict[bool, Outcome] = {}


async def undisturbed(has_answers: bool) -> Outcome:
    """Return the answers of an engine without losses."""
    if has_answers not in _undisturbed:
        async with fake_async_engine(ANSWERS if has_answers else None) as engine:
            _undisturbed[has_answers] = await ask_all(engine, stream=False)
            assert await ask_all(engine, stream=True) == _undisturbed[has_answers]
    return _undisturbed[has_answers]


def frontend_of(engine: AsyncEngine) -> EngineFrontend:
    assert engine._run is not None
    assert engine._run.frontend is not None
    return engine._run.frontend


def pid_of(engine: AsyncEngine | Engine, role: str) -> int:
    pid = next(process["pid"] for process in engine.health()["processes"] if process["role"] == role)
    assert pid != os.getpid()
    return pid


async def until_restarted(engine: AsyncEngine, num_restarts: int) -> None:
    await until(lambda: engine.stats()["num_restarts"] == num_restarts and engine.health()["state"] == "running")


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until no request runs and all pages are free."""
    names = ("num_running", "num_waiting", "num_streams", "num_detokenizing")

    def is_idle() -> bool:
        stats = engine.stats()
        return not any(stats[name] for name in names) and stats["num_free_pages"] == stats["num_pages"]

    await until(is_idle)
