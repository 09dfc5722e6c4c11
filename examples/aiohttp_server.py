"""A streaming server with aiohttp: server-sent events, 429 when full, abort on disconnect, health, drain on SIGTERM.

python examples/aiohttp_server.py --port 8000
curl -N localhost:8000/generate -d '{"prompt": "The capital of France is"}'
"""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable

from aiohttp import web

from aioengine import AsyncEngine, EngineError, EngineOverloadedError

parser = argparse.ArgumentParser()
for name in ("--port", "--max-running-requests", "--max-queued-requests"):
    parser.add_argument(name, type=int)
flags = vars(parser.parse_args())
port, engine = flags.pop("port") or 8000, AsyncEngine(**flags)


async def run_engine(_: web.Application) -> AsyncIterator[None]:
    async def stop_after(event: Awaitable[object]) -> None:
        if await event is not None:  # it was not shut down
            signal.raise_signal(signal.SIGINT)

    async with engine:  # on SIGTERM open streams come to their ends and new ones get 503, then the server stops
        tasks, loop = {asyncio.create_task(stop_after(engine.wait_failed()))}, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(stop_after(engine.drain(30)))))
        yield


async def generate(request: web.Request) -> web.StreamResponse:
    try:  # a request with rid and resume_ttl that comes again, with the last id that was read, goes on behind it
        ask, at = await request.json(), int(request.headers.get("Last-Event-ID", -1))
        stream = await (engine.attach(ask["rid"], at) if at >= 0 else engine.async_generate(**{**ask, "stream": True}))
    except (KeyError, TypeError, ValueError, EngineError) as error:
        retry = {"Retry-After": f"{error.retry_after + 1:.0f}"} if isinstance(error, EngineOverloadedError) else {}
        status = 429 if retry else 503 if isinstance(error, EngineError) else 400
        return web.Response(text=str(error), status=status, headers=retry)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async with stream:  # a client that goes away leaves this block, which aborts its request, or detaches it
        await response.prepare(request)
        async for chunk in stream:
            event = f"id: {chunk['text_offset'] + len(chunk['text'])}\ndata: {json.dumps(chunk)}\n\n"
            await response.write(event.encode())
    return response


async def health(_: web.Request) -> web.Response:
    return web.json_response({**engine.health(), "stats": engine.stats()}, status=200 if engine.is_alive else 503)


app = web.Application()
app.add_routes([web.post("/generate", generate), web.get("/health", health)])
app.cleanup_ctx.append(run_engine)
web.run_app(app, host="127.0.0.1", port=port, handler_cancellation=True)
raise SystemExit(engine.health()["state"] in {"dead", "stalled"})
