"""A server with aiohttp (`pip install aiohttp`).

python examples/aiohttp_server.py --port 8000
curl -N localhost:8000/generate -d '{"prompt": "The capital of France is"}'

POST /generate  Server-sent events, one per chunk; with "stream": false one JSON object. Status 400: wrong request; 503
                with Retry-After: the engine is full. A client that disconnects aborts its request.
GET /health     Status 200 while the engine lives, otherwise 503.

A client that sends `rid` and `resume_ttl` can reconnect: it sends the same request again, with the id of the last event
that it read as Last-Event-ID, and the stream continues after that event.

On SIGTERM, open streams end, new requests get 503, and the server stops. If the engine dies, it stops with status 1.
"""

import argparse
import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from aiohttp import web

from aioengine import Answer, AsyncEngine, BatchOutput, EngineError, Stream
from aioengine.http import headers_of, status_of

DRAIN_S = 30
ENGINE = web.AppKey("engine", AsyncEngine)
FIELDS = {"prompt", "input_ids", "sampling_params", "timeout", "rid", "resume_ttl", "stream"}


async def run_engine(app: web.Application) -> AsyncIterator[None]:
    """Run the engine for the lifetime of the app."""
    engine = app[ENGINE]

    async def stop_after(end: Awaitable[object]) -> None:
        if await end is not None:  # wait_failed() returns None when the engine was shut down
            signal.raise_signal(signal.SIGINT)  # which ends web.run_app

    async with engine:
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(stop_after(engine.wait_failed()))}
        loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(stop_after(engine.drain(DRAIN_S)))))
        yield


async def generate(request: web.Request) -> web.StreamResponse:
    try:
        answer = await ask(request.app[ENGINE], await read_body(request), request.headers.get("Last-Event-ID"))
    except (TypeError, ValueError, EngineError) as error:
        return web.Response(text=str(error), status=status_of(error), headers=headers_of(error))
    if not isinstance(answer, Stream):
        return web.json_response(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with contextlib.suppress(ConnectionResetError):  # raised if the client has disconnected
        async with answer:  # leaving this block aborts the request, or detaches it
            await response.prepare(request)
            async for event in events(answer):
                await response.write(event.encode())
    return response


async def read_body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())  # request.json() accepts any charset that a client names
    except (RecursionError, web.RequestPayloadError) as error:
        raise ValueError(f"the body cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise TypeError(f"the body is a {type(body).__name__}; send a dictionary")
    if unknown := sorted(body.keys() - FIELDS):
        raise ValueError(f"unknown: {', '.join(unknown)[:200]}; allowed: {', '.join(sorted(FIELDS))}")
    return body


async def ask(engine: AsyncEngine, body: dict[str, Any], last_event_id: str | None) -> Stream | Answer | BatchOutput:
    if last_event_id is not None and isinstance(body.get("rid"), str):
        return await engine.attach(body["rid"], int(last_event_id))
    return await engine.async_generate(**({"stream": True} | body))


async def events(stream: Stream) -> AsyncIterator[str]:
    """Yield server-sent events. With one answer, the id of an event is the number of characters up to its end."""
    try:
        async for chunk in stream:
            event_id = "" if "index" in chunk else f"id: {chunk['text_offset'] + len(chunk['text'])}\n"
            yield f"{event_id}data: {json.dumps(chunk)}\n\n"
    except EngineError as error:  # the status was sent before the first chunk
        yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"


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
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-queued-requests", type=int)
    flags = vars(parser.parse_args())
    host, port = flags.pop("host"), flags.pop("port")
    engine = AsyncEngine(**flags)
    web.run_app(make_app(engine), host=host, port=port, handler_cancellation=True)  # aborts if a client disconnects
    return int(engine.health()["state"] in {"dead", "stalled"})


if __name__ == "__main__":
    raise SystemExit(main())
