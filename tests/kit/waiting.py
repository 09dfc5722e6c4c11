"""Waits for conditions by polling, and switches threads often."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the condition has no event
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.001) -> bool:
    """Block the thread until ``condition`` holds. Return False if it does not hold in time.

    every_s: time between two checks. Longer if a check slows other processes down.
    """
    until_at = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < until_at:
        time.sleep(every_s)
    return bool(holds)


@contextmanager
def rapid_switches() -> Iterator[None]:
    """Switch threads after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
