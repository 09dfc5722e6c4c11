"""Waiting for capacity: an unused place is given to the next caller, also if the loop's timers are early."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from aioengine.frontend.calls import overload
from aioengine.frontend.calls.overload import CallerQueue, QueueLimits, Reservation
from aioengine.settings.config import QueueConfig

if TYPE_CHECKING:
    from collections.abc import Callable

EARLY_S = 0.01


class HastyLoop(asyncio.SelectorEventLoop):
    """Its timers are early, like those of loops that count in milliseconds."""

    num_timers = 0

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, **options: object
    ) -> asyncio.TimerHandle:
        self.num_timers += 1
        return super().call_later(max(0.0, delay - EARLY_S), callback, *args)


@pytest.mark.parametrize("num_places", [1, 3])
def test_next_tasks_get_capacity_that_is_not_used_in_time(monkeypatch: pytest.MonkeyPatch, num_places: int) -> None:
    monkeypatch.setattr(overload, "RESERVED_S", 3 * EARLY_S)
    loop = HastyLoop()

    async def wait(queue: CallerQueue, order: list[int], number: int) -> None:
        await queue.wait()
        order.append(number)

    async def main() -> None:
        limits = QueueLimits(QueueConfig(max_requests=num_places - 1), max_running=1, max_total_tokens=100)
        queue = CallerQueue(limits, threading.RLock(), loop)
        order: list[int] = []
        line = [asyncio.create_task(wait(queue, order, number)) for number in range(4 * num_places)]
        async with asyncio.timeout(20):
            await asyncio.wait(line)
            assert order == list(range(4 * num_places))
            while limits.due_at is not None:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0.001)
        limits.reserve(Reservation(limits))
        before = loop.num_timers
        await asyncio.sleep(0.001)
        assert loop.num_timers - before <= 1  # the timer of the sleep

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("is_closed", [True, False])
def test_next_waiter_gets_the_capacity_of_a_waiter_whose_loop_has_ended(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """At once if that loop is closed, otherwise after the time in which a place must be used."""
    monkeypatch.setattr(overload, "RESERVED_S", 3 * EARLY_S)
    elsewhere = asyncio.new_event_loop()

    async def main() -> None:
        limits = QueueLimits(QueueConfig(max_requests=0), max_running=1, max_total_tokens=100)
        queue = CallerQueue(limits, threading.RLock(), asyncio.get_running_loop())
        limits.reserve(opened := Reservation(limits))
        first = elsewhere.create_task(queue.wait())

        def stand_in_line() -> None:
            elsewhere.call_soon(elsewhere.stop)
            elsewhere.run_forever()
            if is_closed:
                elsewhere.close()

        await asyncio.to_thread(stand_in_line)
        second = asyncio.create_task(queue.wait())
        await asyncio.sleep(0)
        assert len(limits._queue) == 2
        limits.release(opened, time.monotonic())
        async with asyncio.timeout(30):
            await second
        assert not first.done()

    asyncio.run(main())
    if not is_closed:
        for task in asyncio.all_tasks(elsewhere):
            task.cancel()
        elsewhere.run_until_complete(asyncio.sleep(0))
        elsewhere.close()
