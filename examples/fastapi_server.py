"""A streaming server with FastAPI: server-sent events, 429 when full, abort on disconnect, health, drain on SIGTERM.

python examples/fastapi_server.py --port 8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "The capital of France is"}'
"""

import argparse
import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse

from aioengine import AsyncEngine, EngineError, EngineOverloadedError, Stream

parser = argparse.ArgumentParser()
for name in ("--port", "--max-running-requests", "--max-queued-requests"):
    parser.add_argument(name, type=int)
flags = vars(parser.parse_args())
port, engine = flags.pop("port") or 8000, AsyncEngine(**flags)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async def stop_after(event: Awaitable[object]) -> None:
        await event
        server.should_exit = True

    async with engine:  # on SIGTERM open streams come to their ends and new ones get 503, then the server stops
        tasks, loop = {asyncio.create_task(stop_after(engine.wait_failed()))}, asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(stop_after(engine.drain(30)))))
        yield


async def events(stream: Stream) -> AsyncIterator[str]:
    async with stream:  # a client that goes away leaves this block, which aborts its request, or detaches it
        async for chunk in stream:
            yield f"id: {chunk['text_offset'] + len(chunk['text'])}\ndata: {json.dumps(chunk)}\n\n"


async def generate(ask: dict[str, Any], at: Annotated[int, Header(alias="Last-Event-ID")] = -1) -> StreamingResponse:
    try:  # a request with rid and resume_ttl that comes again, with the last id that was read, goes on behind it
        stream = engine.attach(ask["rid"], at) if at >= 0 else engine.async_generate(**ask | {"stream": True})
        return StreamingResponse(events(await stream), media_type="text/event-stream")
    except EngineOverloadedError as error:
        raise HTTPException(429, str(error), {"Retry-After": f"{error.retry_after + 1:.0f}"}) from error
    except (KeyError, TypeError, ValueError, EngineError) as error:
        raise HTTPException(503 if isinstance(error, EngineError) else 400, str(error)) from error


app = FastAPI(lifespan=lifespan)
app.post("/generate")(generate)
app.get("/health")(lambda: JSONResponse(engine.health() | {"stats": engine.stats()}, 200 if engine.is_alive else 503))
(server := uvicorn.Server(uvicorn.Config(app, port=port))).run()
raise SystemExit(engine.health()["state"] in {"dead", "stalled"})
