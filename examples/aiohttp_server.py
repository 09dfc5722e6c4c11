"""A streaming server with aiohttp (`pip install aiohttp`).

python examples/aiohttp_server.py --port 8000
curl -N localhost:8000/generate -d '{"prompt": "The capital of France is"}'

POST /generate  answers with server-sent events, one a chunk; with an index where there are several answers. A wrong
                request gets status 400, one too many 503 with Retry-After; a client that goes away aborts its own.
GET /health     status 200 while the engine lives.

A client that gives `rid` and `resume_ttl` may lose its connection: when it sends the same request again, with the id
of the last event that it read as Last-Event-ID, the stream goes on behind that event.

On SIGTERM open streams end, new ones get 503, then the server stops; it stops with status 1 when the engine dies.
"""

import argparse
import asyncio
import contextlib
import json
import math
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from aiohttp import web

from aioengine import AsyncEngine, EngineError, EngineOverloadedError, RequestError, Stream

DRAIN_S = 30
ENGINE = web.AppKey("engine", AsyncEngine)
FIELDS = {"prompt", "input_ids", "sampling_params", "timeout", "rid", "resume_ttl"}


async def run_engine(app: web.Application) -> AsyncIterator[None]:
    """The engine lives as long as the app."""
    engine = app[ENGINE]

    async def stop_after(event: Awaitable[object]) -> None:
        if await event is not None:  # wait_failed() returns None when the engine was shut down
            signal.raise_signal(signal.SIGINT)  # which ends web.run_app

    async with engine:
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(stop_after(engine.wait_failed()))}
        loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(stop_after(engine.drain(DRAIN_S)))))
        yield


async def generate(request: web.Request) -> web.StreamResponse:
    try:
        body = json.loads(await request.read())  # request.json() looks up any charset that a client names
        stream = await open_stream(request.app[ENGINE], body, request.headers.get("Last-Event-ID"))
    except (TypeError, ValueError, RecursionError, web.RequestPayloadError, EngineError) as error:
        return refusal(error)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with contextlib.suppress(ConnectionResetError):  # a client that goes away
        async with stream:  # its request is aborted, or detached, when this block is left
            await response.prepare(request)
            async for event in events(stream):
                await response.write(event.encode())
    return response


async def open_stream(engine: AsyncEngine, body: Any, last_event_id: str | None) -> Stream:
    if not isinstance(body, dict):
        raise TypeError(f"the body is a {type(body).__name__}, and must be a dictionary")
    if unknown := sorted(body.keys() - FIELDS):
        raise ValueError(f"unknown: {', '.join(unknown)[:200]}; there are {', '.join(sorted(FIELDS))}")
    if last_event_id is not None and isinstance(body.get("rid"), str):
        return await engine.attach(body["rid"], int(last_event_id))
    return await engine.async_generate(**body, stream=True)


async def events(stream: Stream) -> AsyncIterator[str]:
    """Server-sent events; the id of an event, where there is one answer, is the number of characters up to its end."""
    try:
        async for chunk in stream:
            event_id = "" if "index" in chunk else f"id: {chunk['text_offset'] + len(chunk['text'])}\n"
            yield f"{event_id}data: {json.dumps(chunk)}\n\n"
    except EngineError as error:  # the status was sent long ago
        yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"


def refusal(error: Exception) -> web.Response:
    """The answer to a request that was refused, or failed before its first chunk."""
    if isinstance(error, EngineOverloadedError):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
        return web.Response(text=str(error), status=error.status_code, headers=headers)
    if isinstance(error, EngineError):
        return web.Response(text=str(error), status=500 if isinstance(error, RequestError) else 503)
    return web.Response(text=str(error), status=400)


async def health(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return web.json_response({**engine.health(), "stats": engine.stats()}, status=200 if engine.is_alive else 503)


def make_app(engine: AsyncEngine) -> web.Application:
    app = web.Application()
    app[ENGINE] = engine
    app.add_routes([web.post("/generate", generate), web.get("/health", health)])
    app.cleanup_ctx.append(run_engine)
    return app


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-queued-requests", type=int)
    flags = vars(parser.parse_args())
    port = flags.pop("port")
    engine = AsyncEngine(**flags)
    web.run_app(make_app(engine), host="127.0.0.1", port=port, handler_cancellation=True)
    return int(engine.health()["state"] in {"dead", "stalled"})


if __name__ == "__main__":
    raise SystemExit(main())
