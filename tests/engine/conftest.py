from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
import uvloop
from blockbuster import blockbuster_ctx

from tests.engine.double import World


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test of this folder runs on both kinds of loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
