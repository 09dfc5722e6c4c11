"""SlowReaders: suspends or ends calls whose readers do not read.

By default, slow readers have no effect: their unread output is merged into one chunk, about 50 bytes per token.
With ``slow_reader`` "pause" or "abort", a timer checks all streams. Reading and writing do no extra work.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aioengine.frontend.calls.call import Call, NotifyOn, ReadPosition
from aioengine.frontend.calls.calls import Calls
from aioengine.protocol.messages import FinishCode
from aioengine.settings.config import DeliveryConfig

CHECKS_PER_TIMEOUT: Final = 4
"""Checks per ``slow_reader_timeout``. So a slow reader is noticed up to a quarter of the timeout later."""


class SlowReaders:
    """Suspends or ends calls whose readers do not read. On the engine's loop.

    A call is suspended again only after its reader has read.
    """

    def __init__(self, config: DeliveryConfig, calls: Calls) -> None:
        self._config = config
        self._calls = calls
        self._positions: dict[Call, tuple[ReadPosition, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check the readers periodically, unless slow readers have no effect."""
        if self._config.slow_reader != "coalesce":
            every_s = self._config.slow_reader_timeout_s / CHECKS_PER_TIMEOUT
            self._timer = asyncio.get_running_loop().call_later(every_s, self._check)

    def release(self) -> None:
        """Stop suspending calls, and resume suspended calls. For ``drain``, which waits for all calls."""
        if self._config.slow_reader == "pause":
            self.stop()
            for call in list(self._calls.opened):
                if call.notify_on is NotifyOn.EACH_READ:
                    self._calls.on_read(call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _check(self) -> None:
        config = self._config
        positions: dict[Call, tuple[ReadPosition, int]] = {}
        for call in list(self._calls.opened):
            position = call.read_position
            if position is None:
                continue
            before, num_checks = self._positions.get(call, (None, 0))
            num_checks = num_checks + 1 if before == position else 0
            positions[call] = position, num_checks
            if num_checks != CHECKS_PER_TIMEOUT:
                continue
            if config.slow_reader == "pause":
                self._calls.suspend(call, position)
            else:
                why = f"its reader has read nothing for slow_reader_timeout={config.slow_reader_timeout_s:g} seconds"
                self._calls.end([call], FinishCode.ABORT, why)
        self._positions = positions
        self.watch()
