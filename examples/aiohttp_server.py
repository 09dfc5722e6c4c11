"""A streaming server with aiohttp: server-sent events, 429 when full, abort on disconnect, health, drain on SIGTERM.

python examples/aiohttp_server.py --port 8000
curl -N localhost:8000/generate -d '{"prompt": "The capital of France is"}'
"""

import argparse
import json
import math
from collections.abc import AsyncIterator

from aiohttp import web

from aioengine import AsyncEngine, EngineError, EngineOverloadedError

ENGINE = web.AppKey("engine", AsyncEngine)


async def run_engine(app: web.Application) -> AsyncIterator[None]:
    async with app[ENGINE] as engine:
        yield
        await engine.drain(timeout=30)  # aiohttp has let the open streams end; whatever is left ends here


async def generate(request: web.Request) -> web.StreamResponse:
    ask = await request.json()
    try:
        stream = await request.app[ENGINE].async_generate(ask["prompt"], ask.get("sampling_params"), stream=True)
    except EngineOverloadedError as error:
        raise web.HTTPTooManyRequests(
            text=str(error), headers={"Retry-After": str(math.ceil(error.retry_after))}
        ) from error
    except EngineError as error:
        raise web.HTTPServiceUnavailable(text=str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async with stream:  # a client that goes away leaves this block, and that ends its request
        await response.prepare(request)
        async for chunk in stream:
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    return response


async def health(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return web.json_response({**engine.health(), "stats": engine.stats()}, status=200 if engine.is_alive else 503)


parser = argparse.ArgumentParser()
for name, default in (("port", 8000), ("max-running-requests", 64), ("max-queued-requests", 256)):
    parser.add_argument(f"--{name}", type=int, default=default)
flags = parser.parse_args()
app = web.Application()
app[ENGINE] = AsyncEngine(
    max_running_requests=flags.max_running_requests, max_queued_requests=flags.max_queued_requests
)
app.add_routes([web.post("/generate", generate), web.get("/health", health)])
app.cleanup_ctx.append(run_engine)
web.run_app(app, port=flags.port, handler_cancellation=True)
