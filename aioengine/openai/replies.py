"""JSON responses, server-sent events, and errors in the forms of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.api.answers import FinishReason
from aioengine.api.stream import Stream
from aioengine.errors import EngineError, EngineOverloadedError
from aioengine.http import status_of

encode = msgspec.json.Encoder().encode

JSON: Final = "application/json"
DONE: Final = b"data: [DONE]\n\n"

_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED: Final = 429
_ANTHROPIC_OVERLOADED: Final = 529


class CallError(ValueError):
    """A request that is refused before the engine sees it. ``param``: the field; ``code``: OpenAI's name of the error.

    Attributes:
        status_code: the HTTP status.
    """

    def __init__(
        self, message: str, status_code: int = 400, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.code = code
        self.param = param


Errors = EngineError | ValueError | TypeError
"""The errors that a call may raise."""


def json_response(value: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status_code, headers, JSON)


class EventStream(Response):
    """A response with the events of a stream. A disconnect of the client leaves the stream.

    Starlette's ``StreamingResponse`` does the same with more tasks and more layers for each event.
    """

    def __init__(self, stream: Stream, events: AsyncGenerator[bytes], failed: Callable[[Errors], bytes]) -> None:
        """failed: returns the last events if the stream raises an error."""
        self._stream = stream
        self._events = events
        self._failed = failed
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background: BackgroundTask | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # the second is for nginx

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_leave_at_disconnect(self._stream, receive))
        try:
            async with self._stream, aclosing(self._events):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    async for event in self._events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                except (EngineError, ValueError, TypeError) as error:  # the status was sent before the first event
                    await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
        if self.background is not None:  # of the app's own dependencies
            await self.background()


async def _leave_at_disconnect(stream: Stream, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await stream.aclose()  # aborts the request, or detaches from it


def openai_error(error: Errors) -> tuple[int, Mapping[str, object]]:
    """Return the status and the body of an error in OpenAI's form."""
    status = _OVERLOADED if isinstance(error, EngineOverloadedError) else status_of(error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code, param = (error.code, error.param) if isinstance(error, CallError) else (None, None)
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def anthropic_error(error: Errors) -> tuple[int, Mapping[str, object]]:
    """Return the status and the body of an error in Anthropic's form."""
    status = _ANTHROPIC_OVERLOADED if isinstance(error, EngineOverloadedError) else status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": str(error)}}


def check_completed(reason: FinishReason) -> None:
    """Raise EngineError if the server ended an answer early, because the APIs have no finish reason for that."""
    if reason in ("abort", "shutdown"):
        raise EngineError(f"the answer was ended before it was complete: {reason['message']}")
