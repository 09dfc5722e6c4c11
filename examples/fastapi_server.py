"""A streaming server with FastAPI: server-sent events, 429 when full, abort on disconnect, health, drain on SIGTERM.

python examples/fastapi_server.py --port 8000
curl -N localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "The capital of France is"}'
"""

import argparse
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Annotated

import uvicorn
from fastapi import Body, FastAPI, HTTPException, Response
from fastapi.responses import StreamingResponse

from aioengine import AsyncEngine, EngineError, EngineOverloadedError, Stream

parser = argparse.ArgumentParser()
for name, default in (("port", 8000), ("max-running-requests", 64), ("max-queued-requests", 256)):
    parser.add_argument(f"--{name}", type=int, default=default)
flags = parser.parse_args()
engine = AsyncEngine(max_running_requests=flags.max_running_requests, max_queued_requests=flags.max_queued_requests)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield
        await engine.drain(timeout=30)  # uvicorn has let the open streams end; whatever is left ends here


async def events(stream: Stream) -> AsyncIterator[str]:
    async with stream:  # a client that goes away leaves this block, and that ends its request
        async for chunk in stream:
            yield f"data: {json.dumps(chunk)}\n\n"


async def generate(
    prompt: Annotated[str, Body()], sampling_params: Annotated[dict[str, object] | None, Body()] = None
) -> StreamingResponse:
    try:
        stream = await engine.async_generate(prompt, sampling_params, stream=True)
    except EngineOverloadedError as error:
        raise HTTPException(429, str(error), {"Retry-After": str(math.ceil(error.retry_after))}) from error
    except (TypeError, ValueError, EngineError) as error:
        raise HTTPException(503 if isinstance(error, EngineError) else 400, str(error)) from error
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def health(response: Response) -> dict[str, object]:
    response.status_code = 200 if engine.is_alive else 503
    return {**engine.health(), "stats": engine.stats()}


app = FastAPI(lifespan=lifespan)
app.post("/generate")(generate)
app.get("/health")(health)
uvicorn.run(app, port=flags.port)
