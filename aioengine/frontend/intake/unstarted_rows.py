"""Rows that end without being submitted to the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from aioengine.errors import RequestError, RequestTooLargeError, describe
from aioengine.protocol.messages import End, FinishCode
from aioengine.supervision.tasks import post

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from aioengine.api.answers import RowError
    from aioengine.frontend.calls.call import Call, CallRow, Ending

MAX_ROWS_ENDED_AT_ONCE: Final = 512
"""Rows that are ended in one turn of the loop. Each takes up to 10 microseconds."""


class UnstartedRows:
    """Ends the rows of calls that will not start. On the engine's loop."""

    def __init__(self, *, lock: threading.RLock, settle: Callable[[Call], None]) -> None:
        """``settle`` is called with every call whose rows have all ended."""
        self._lock = lock
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._ending: deque[Call] = deque()

    def end(self, call: Call, ending: Ending) -> None:
        """Start no more rows of the call, and end the rows that were not started.

        They end in the next turns of the loop, because a large batch would block it. If the call is ending already,
        nothing changes.
        """
        if call.ending is None and call.num_started < call.request.num_rows:
            call.ending = ending
            self._ending.append(call)
            if len(self._ending) == 1:
                post(self._loop, self.end_some)
        with self._lock:
            call.accept()

    async def wait(self) -> None:
        """Wait until all these rows have ended."""
        while self._ending:  # noqa: ASYNC110  # it is over after a known number of turns
            await asyncio.sleep(0)

    def end_some(self, max_rows: int = MAX_ROWS_ENDED_AT_ONCE) -> None:
        """End some rows, one call after the other, and more in the next turn of the loop."""
        try:
            while self._ending and max_rows > 0:
                call = self._ending.popleft()
                max_rows -= self._end_rows(call, max_rows)
        finally:
            if self._ending:
                post(self._loop, self.end_some)

    def _end_rows(self, call: Call, max_rows: int) -> int:
        """Return the number of ended rows, at least 1, because an empty call takes time too."""
        request, first = call.request, call.num_started
        ending = cast("Ending", call.ending)
        try:
            with self._lock:
                while not call.is_over and call.num_started < min(first + max_rows, request.num_rows):
                    position = call.num_started
                    call.num_started += 1
                    prompt = position // request.num_samples
                    row = call.row_type(
                        call,
                        position,
                        call.row_rid(position),
                        index=position if request.gives_batch else None,
                        shows_prompt=request.shows_prompt,
                        readers=request.readers_of(prompt, 0, 0),
                        states=request.states_of(prompt),
                        is_queued=not call.is_stream,
                    )
                    call.add_row(row)
                    end_row(row, *ending)
        except BaseException as error:
            with self._lock:
                call.fail(RequestError("submit", describe(error)))
            self._settle(call)
            raise
        if call.num_started < request.num_rows and not call.is_over:
            self._ending.append(call)
        else:
            self._settle(call)
        return max(1, call.num_started - first)


def refuse_row(row: CallRow, error: RowError) -> None:
    is_too_large = isinstance(error, RequestTooLargeError)
    end_row(row, FinishCode.TOO_LARGE if is_too_large else FinishCode.FAILED, error=error)


def end_row(row: CallRow, code: FinishCode, matched: str | None = None, error: RowError | None = None) -> None:
    """End a row that never reached the scheduler."""
    now = time.monotonic()
    message = "" if error is None else str(error)
    finished = End(uid=-1, code=code, matched=matched, stage="tokenize", message=message, ended_at=now)
    row.call.end_row(row, finished, now, error)
