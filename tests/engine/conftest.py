from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop
from blockbuster import BlockBuster

from tests.engine.engine_double import World


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of this folder on both kinds of loop, except tests with the mark ``one_loop``."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": loops["asyncio"]} if item.get_closest_marker("one_loop") else loops


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """A started engine with a double of its processes. Blocking the loop's thread fails the test."""
    here = World()
    await here.engine.start()
    blockbuster = BlockBuster()
    blockbuster.activate()
    try:
        yield here
    finally:
        blockbuster.deactivate()
        await here.engine.shutdown()
