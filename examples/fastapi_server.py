"""A streaming server with FastAPI (`pip install fastapi uvicorn`).

python examples/fastapi_server.py --port 8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "The capital of France is"}'

POST /generate  answers with server-sent events, one a chunk; with an index where there are several answers. A wrong
                request gets status 400, one too many 503 with Retry-After; a client that goes away aborts its own.
GET /health     status 200 while the engine lives.

A client that gives `rid` and `resume_ttl` may lose its connection: when it sends the same request again, with the id
of the last event that it read as Last-Event-ID, the stream goes on behind that event.

On SIGTERM open streams end, new ones get 503, then the server stops; it stops with status 1 when the engine dies.
"""

import argparse
import asyncio
import json
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from aioengine import AsyncEngine, EngineError, EngineOverloadedError, RequestError, Stream

DRAIN_S = 30
LastEventId = Annotated[int | None, Header()]


class GenerateRequest(BaseModel, extra="forbid"):
    prompt: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    timeout: float | None = None
    rid: str | list[str] | None = None
    resume_ttl: float | None = None


def make_app(engine: AsyncEngine, stop: Callable[[], None]) -> FastAPI:
    """The app around an engine; `stop` is called when the server should end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def stop_after(event: Awaitable[object]) -> None:
            await event
            stop()

        async with engine:
            tasks = {asyncio.create_task(stop_after(engine.wait_failed()))}
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, lambda: tasks.add(asyncio.create_task(stop_after(engine.drain(DRAIN_S))))
            )
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(request: GenerateRequest, last_event_id: LastEventId = None) -> StreamingResponse:
        try:
            if last_event_id is not None and isinstance(request.rid, str):
                stream = await engine.attach(request.rid, last_event_id)
            else:
                stream = await engine.async_generate(**request.model_dump(), stream=True)
        except (TypeError, ValueError, EngineError) as error:
            raise refusal(error) from error
        return StreamingResponse(events(stream), media_type="text/event-stream")

    @app.exception_handler(RequestValidationError)
    async def wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # FastAPI's own answer repeats the body, however large, and cannot write NaN
        return JSONResponse({"detail": f"{first['msg']} ({'.'.join(map(str, first['loc']))[:200]})"}, 400)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({**engine.health(), "stats": engine.stats()}, 200 if engine.is_alive else 503)

    return app


async def events(stream: Stream) -> AsyncIterator[str]:
    """Server-sent events; the id of an event, where there is one answer, is the number of characters up to its end."""
    async with stream:  # a client that goes away leaves this block, which aborts its request, or detaches it
        try:
            async for chunk in stream:
                event_id = "" if "index" in chunk else f"id: {chunk['text_offset'] + len(chunk['text'])}\n"
                yield f"{event_id}data: {json.dumps(chunk)}\n\n"
        except EngineError as error:  # the status was sent long ago
            yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"


def refusal(error: Exception) -> HTTPException:
    """The answer to a request that was refused, or failed before its first chunk."""
    if isinstance(error, EngineOverloadedError):
        return HTTPException(error.status_code, str(error), {"Retry-After": str(math.ceil(error.retry_after))})
    if isinstance(error, EngineError):
        return HTTPException(500 if isinstance(error, RequestError) else 503, str(error))
    return HTTPException(400, str(error))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-queued-requests", type=int)
    flags = vars(parser.parse_args())
    port, engine = flags.pop("port"), AsyncEngine(**flags)
    server = uvicorn.Server(uvicorn.Config(make_app(engine, lambda: setattr(server, "should_exit", True)), port=port))
    server.run()
    return int(engine.health()["state"] in {"dead", "stalled"})


if __name__ == "__main__":
    raise SystemExit(main())
