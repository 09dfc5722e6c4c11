"""Questions and orders to the scheduler process, each answered by one reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineStalledError, RequestError
from aioengine.protocol.messages import MAX_PAYLOAD_BYTES, Control, Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.errors import EngineError
    from aioengine.protocol.messages import Argument

CONTROL_TIMEOUT_S: Final = 60.0


class Controls:
    """The questions on their way. Belongs to the engine's loop."""

    def __init__(self, send: Callable[[list[Control]], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._num_asked = 0
        self._failure: EngineError | None = None

    async def ask(
        self,
        name: str,
        arguments: dict[str, Argument] | None = None,
        *,
        payload: bytes = b"",
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Reply:
        """CallRequest, and wait for the answer. ``payload``: bytes for the runner, up to ``MAX_PAYLOAD_BYTES``.

        Raises:
            ValueError: the payload is too large.
            RequestError: the runner failed to do it, or a process died before the answer came, and is replaced.
            EngineStalledError: none came in time.
            EngineError: the engine died, or was shut down, before it came.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"the payload of {name!r} has {len(payload):,} bytes, the limit is {MAX_PAYLOAD_BYTES:,}; "
                "write it to a file and give the file's path"
            )
        self._num_asked += 1
        call_id = self._num_asked
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        try:
            self._send([Control(call_id, name, arguments or {}, payload)])
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineStalledError(
                f"the scheduler did not answer {name!r} within {timeout_s:g} s; see health()"
            ) from None
        finally:
            del self._waiting[call_id]

    def tell(self, name: str) -> None:
        """Order something, and do not wait for the answer."""
        self._num_asked += 1
        self._send([Control(self._num_asked, name)])

    def answer(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.call_id)
        if waiting is None or waiting.done():
            return
        if reply.stage:
            waiting.set_exception(RequestError(reply.stage, reply.message))
        else:
            waiting.set_result(reply)

    def fail(self, error: EngineError) -> None:
        """No answer will come any more."""
        self._failure = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
