"""HTTP statuses, headers and disconnects, for servers written with any web framework."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from aioengine.errors import EngineOverloadedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aioengine.api.stream import Generation

__all__ = ["headers_of", "status_of", "until_disconnect"]

Result = TypeVar("Result")


class ASGIRequest(Protocol):
    """A request or a websocket of FastAPI, Starlette or another ASGI framework."""

    @property
    def receive(self) -> Callable[[], Awaitable[Mapping[str, object]]]:
        """The ``receive`` callable of ASGI."""
        ...


def status_of(error: BaseException) -> int:
    """Return the HTTP status for ``error``.

    This is its ``status_code`` if it has one, 400 for any other ``ValueError`` or ``TypeError``, and 500 otherwise.
    """
    status: int = getattr(error, "status_code", 400 if isinstance(error, ValueError | TypeError) else 500)
    return status


def headers_of(error: BaseException) -> dict[str, str]:
    """Return the HTTP headers for ``error``: ``Retry-After``, in whole seconds, for an ``EngineOverloadedError``."""
    return {"Retry-After": str(math.ceil(error.retry_after))} if isinstance(error, EngineOverloadedError) else {}


async def until_disconnect(request: ASGIRequest, generation: Generation[Result]) -> Result:
    """Await ``generation``; if the client disconnects first, abort it.

    An aborted generation returns its output so far with the finish reason ``abort`` (``async_encode`` and
    ``async_rerank`` raise ``RequestError``). The handler then ends as usual, and the web server discards its response.

    Read the body of ``request`` before the call, because this function discards it. It also discards messages that a
    websocket receives during the call. FastAPI reads the body for the parameters of a handler. Frameworks that cancel
    the handler of a disconnected client need no such function; aiohttp does so with ``handler_cancellation=True``.
    """
    watcher = asyncio.create_task(_abort_at_disconnect(request.receive, generation))
    try:
        return await generation
    finally:
        watcher.cancel()


async def _abort_at_disconnect(
    receive: Callable[[], Awaitable[Mapping[str, object]]], generation: Generation[object]
) -> None:
    # Starlette's request.is_disconnected() does not work: behind an @app.middleware("http") it is always False.
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
    generation.abort()
