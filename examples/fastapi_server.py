"""A server with FastAPI (`pip install fastapi uvicorn`).

python examples/fastapi_server.py --port 8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "The capital of France is"}'

POST /generate  Server-sent events, one per chunk; with "stream": false one JSON object. Status 400: wrong request; 503
                with Retry-After: the engine is full. A client that disconnects aborts its request.
GET /health     Status 200 while the engine lives, otherwise 503.

A client that sends `rid` and `resume_ttl` can reconnect: it sends the same request again, with the id of the last event
that it read as Last-Event-ID, and the stream continues after that event.

On SIGTERM, open streams end, new requests get 503, and the server stops. If the engine dies, it stops with status 1.
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from aioengine import AsyncEngine, EngineError, Stream
from aioengine.http import headers_of, status_of, until_disconnect

DRAIN_S = 30
LastEventId = Annotated[int | None, Header()]


class GenerateRequest(BaseModel, extra="forbid"):
    prompt: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    timeout: float | None = None
    rid: str | list[str] | None = None
    resume_ttl: float | None = None
    stream: bool = True


def make_app(engine: AsyncEngine, stop: Callable[[], None]) -> FastAPI:
    """Return the app of an engine; `stop` is called when the server must stop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def stop_after(end: Awaitable[object]) -> None:
            await end
            stop()

        async with engine:
            tasks = {asyncio.create_task(stop_after(engine.wait_failed()))}
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, lambda: tasks.add(asyncio.create_task(stop_after(engine.drain(DRAIN_S))))
            )
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(request: Request, body: GenerateRequest, last_event_id: LastEventId = None) -> Response:
        try:
            if last_event_id is not None and isinstance(body.rid, str):
                return event_stream(await engine.attach(body.rid, last_event_id))
            if body.stream:
                return event_stream(await engine.async_generate(**body.model_dump()))
            return JSONResponse(await until_disconnect(request, engine.async_generate(**body.model_dump())))
        except (TypeError, ValueError, EngineError) as error:
            raise HTTPException(status_of(error), str(error), headers_of(error)) from error

    @app.exception_handler(RequestValidationError)
    async def wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]  # FastAPI's own response repeats the whole body and cannot encode NaN
        return JSONResponse({"detail": f"{first['msg']} ({'.'.join(map(str, first['loc']))[:200]})"}, 400)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({**engine.health(), "stats": engine.stats()}, 200 if engine.is_alive else 503)

    return app


def event_stream(stream: Stream) -> StreamingResponse:
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def events(stream: Stream) -> AsyncIterator[str]:
    """Yield server-sent events. With one answer, the id of an event is the number of characters up to its end."""
    async with stream:  # a disconnect closes this generator: leaving the block aborts the request, or detaches it
        try:
            async for chunk in stream:
                event_id = "" if "index" in chunk else f"id: {chunk['text_offset'] + len(chunk['text'])}\n"
                yield f"{event_id}data: {json.dumps(chunk)}\n\n"
        except EngineError as error:  # the status was sent before the first chunk
            yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-queued-requests", type=int)
    flags = vars(parser.parse_args())
    host, port = flags.pop("host"), flags.pop("port")
    engine = AsyncEngine(**flags)
    app = make_app(engine, lambda: setattr(server, "should_exit", True))
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port))
    server.run()
    return int(engine.health()["state"] in {"dead", "stalled"})


if __name__ == "__main__":
    raise SystemExit(main())
