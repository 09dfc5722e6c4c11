"""Waiting for what has no event, and thread switches that come often."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.001) -> bool:
    """Wait, on a thread that runs no loop, until ``condition`` holds; false where it never did.

    every_s: time between two looks; longer where a look takes the time of other processes.
    """
    until_at = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < until_at:
        time.sleep(every_s)
    return bool(holds)


@contextmanager
def rapid_switches() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
