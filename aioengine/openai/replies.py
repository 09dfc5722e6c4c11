"""JSON responses, server-sent events, and errors in the forms of OpenAI and Anthropic."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from aioengine.errors import EngineError, EngineOverloadedError
from aioengine.http import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from aioengine.api.answers import FinishReason
    from aioengine.api.stream import Stream

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


def json_response(value: object, status_code: int = 200) -> Response:
    return Response(encode(value), status_code, media_type=JSON)


def event_stream(stream: Stream, events: AsyncGenerator[bytes], failed: Callable[[Errors], bytes]) -> Response:
    """Return a response with the events of a stream. failed: returns the last events if the stream raises an error."""

    async def sent() -> AsyncIterator[bytes]:
        async with stream, aclosing(events):  # a disconnect closes this generator, which aborts or detaches the request
            try:
                async for part in events:
                    yield part
            except (EngineError, ValueError, TypeError) as error:  # the status was sent before the first chunk
                yield failed(error)

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second is for nginx
    return StreamingResponse(sent(), media_type="text/event-stream", headers=headers)


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
