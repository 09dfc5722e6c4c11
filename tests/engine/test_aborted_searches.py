"""Scores and beam searches fail with an error if their requests are aborted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aioengine.errors import RequestError
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aioengine.api.engine import AsyncEngine

CALLS: dict[str, Callable[[AsyncEngine], Coroutine[None, None, object]]] = {
    "score": lambda engine: engine.async_score("x", ["a", "b"], [97, 98]),
    "beam_search": lambda engine: engine.async_beam_search("x", 2, 8),
}


@pytest.mark.parametrize("call", CALLS)
async def test_aborted_search_raises_an_error(call: str) -> None:
    async with fake_async_engine({"": "one two three"}) as engine, asyncio.timeout(20):
        await engine.pause_generation("in_place")
        asked = asyncio.create_task(CALLS[call](engine))
        await until(lambda: engine.stats()["num_streams"] > 0)
        engine.abort_request(abort_all=True)
        with pytest.raises(RequestError, match="'type': 'abort'"):
            await asked
        await engine.continue_generation()
        assert await CALLS[call](engine)
