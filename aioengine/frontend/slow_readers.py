"""Readers of streams that stay away: after a while their requests are suspended, or ended.

By default neither: what is not read is merged into one piece, which grows by about 50 bytes with each token and ends
with the request. Who is away is found by looking at all streams now and then; reading and writing cost nothing more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aioengine.frontend.outputs import Wants
from aioengine.protocol.messages import FinishCode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aioengine.config import DeliveryConfig
    from aioengine.frontend.call_lifecycle import CallLifecycle
    from aioengine.frontend.calls import Call
    from aioengine.frontend.outputs import CallOutput, Place

NUM_LOOKS: Final = 4
"""In ``timeout_s``; so a reader has been away for up to a quarter more of it before anything happens."""


class SlowReaders:
    """Suspends or ends each call whose reader did not read for the time of ``config``; once, until it reads again."""

    def __init__(
        self, config: DeliveryConfig, open_calls: Callable[[], Collection[Call]], lifecycle: CallLifecycle
    ) -> None:
        self._config = config
        self._open_calls = open_calls
        self._lifecycle = lifecycle
        self._places: dict[CallOutput, tuple[Place, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Begin to look now and then, where anything is to be done about slow readers."""
        if self._config.slow_reader != "coalesce":
            every_s = self._config.slow_reader_timeout_s / NUM_LOOKS
            self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def release(self) -> None:
        """Suspend nobody any more, and let those go on who are: the engine waits for their ends."""
        if self._config.slow_reader == "pause":
            self.stop()
            for call in list(self._open_calls()):
                if call.output.wants is Wants.READS:
                    self._lifecycle.on_read(call.output)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        places: dict[CallOutput, tuple[Place, int]] = {}
        for call in list(self._open_calls()):
            place = call.output.place
            if place is None:
                continue
            before, num_looks = self._places.get(call.output, (None, 0))
            num_looks = num_looks + 1 if before == place else 0
            places[call.output] = place, num_looks
            if num_looks == NUM_LOOKS:
                self._act(call, place)
        self._places = places
        self.watch()

    def _act(self, call: Call, place: Place) -> None:
        if self._config.slow_reader == "pause":
            self._lifecycle.suspend(call, place)
        else:
            message = (
                f"its reader stayed away for longer than slow_reader_timeout={self._config.slow_reader_timeout_s:g}"
            )
            self._lifecycle.end_all([call], FinishCode.ABORT, message)
