"""Requests are cancelled at random moments in all ways. Nothing is left, and other requests get the right text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aioengine.api.engine import AsyncEngine
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import until
from tests.processes.restart_kit import until_idle

pytestmark = pytest.mark.process

GREEDY = {"temperature": 0}
LONGEST_S = 0.06
AT_ONCE = 50


async def read(engine: AsyncEngine, number: int, *, stream: bool) -> str:
    """Read a stream that takes about as long as the longest wait. A third has two rows, and some have stop strings."""
    params = GREEDY | {"max_new_tokens": 5 + number % 60, "stop": ["zz"], "n": 1 + (number % 3 == 0)}
    generation = engine.async_generate(f"prompt {number % 40}", params, stream=stream)
    if not stream:
        out = await generation
        return str(out)
    text = ""
    async for chunk in generation:
        text += chunk["text"]
    return text


async def by_cancel(reading: Awaitable[object], delay_s: float) -> None:
    task = asyncio.ensure_future(reading)
    asyncio.get_running_loop().call_later(delay_s, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def by_timeout(reading: Awaitable[object], delay_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await reading


async def by_scope(reading: Awaitable[object], delay_s: float) -> None:
    with anyio.move_on_after(delay_s):
        await reading


async def by_wait_for(reading: Awaitable[object], delay_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reading, delay_s)


async def by_drop(engine: AsyncEngine, number: int, delay_s: float) -> None:
    """Drop the last reference, in a cycle that only garbage collection finds."""
    held: dict[str, object] = {"stream": engine.async_generate(f"prompt {number}", {"max_new_tokens": 60}, stream=True)}
    held["self"] = held
    await asyncio.sleep(delay_s)
    del held
    if number % 10 == 0:
        gc.collect()


WAYS: list[Callable[[Awaitable[object], float], Awaitable[None]]] = [by_cancel, by_timeout, by_scope, by_wait_for]


async def drained(engine: AsyncEngine) -> None:
    gc.collect()
    await until_idle(engine)


async def interrupt(engine: AsyncEngine, draw: random.Random, numbers: range) -> None:
    for number in numbers:
        delay_s = draw.random() * LONGEST_S
        if number % 5 == 4:
            await by_drop(engine, number, delay_s)
        else:
            await draw.choice(WAYS)(read(engine, number, stream=draw.random() < 0.6), delay_s)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (500, {}),
        (500, {"tp_size": 2, "dp_size": 2}),
        pytest.param(2000, {}, marks=pytest.mark.slow),
        pytest.param(1000, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(1000, {"dp_size": 2}, marks=pytest.mark.slow),
    ],
)
async def test_cancellations_at_random_moments_leave_nothing(count: int, sizes: dict[str, int]) -> None:
    draw = random.Random(1)
    async with fake_async_engine(processes=True, step_time_s=0.001, num_pages=256, max_running=16, **sizes) as engine:
        before = await read(engine, 58, stream=True)
        per_task = count // AT_ONCE
        async with asyncio.TaskGroup() as group:
            for start in range(0, count, per_task):
                group.create_task(interrupt(engine, draw, range(start, start + per_task)))
            undisturbed = [group.create_task(read(engine, 58, stream=bool(turn % 2))) for turn in range(4)]
        await drained(engine)
        texts = [task.result() for task in undisturbed]
        assert texts[1] == texts[3] == before
        assert before in texts[0]
        assert engine.stats()["num_aborted"] > count // 4


# ---------------------------------------------------------------- behind a middleware that runs its own task group


class ForwardingMiddleware(BaseHTTPMiddleware):
    """A middleware like Starlette's, which reads the response in another task."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


def app_of(engine: AsyncEngine) -> Starlette:
    async def stream(request: Request) -> Response:
        generation = await engine.async_generate("a", {"max_new_tokens": 200}, stream=True)

        async def lines() -> AsyncIterator[str]:
            async with generation:
                async for chunk in generation:
                    yield f"data: {chunk['text']}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def whole(request: Request) -> Response:
        """A handler that sees a disconnect only if it waits for it."""
        generation = engine.async_generate("b", {"max_new_tokens": 200})

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            generation.abort()

        async with anyio.create_task_group() as group:
            group.start_soon(gone)
            out = await generation
            group.cancel_scope.cancel()
        return JSONResponse(out)

    middleware = [Middleware(ForwardingMiddleware), Middleware(ForwardingMiddleware)]
    return Starlette(routes=[Route("/stream", stream), Route("/whole", whole)], middleware=middleware)


class Uvicorn:
    """A server on this loop."""

    def __init__(self, app: Starlette) -> None:
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    async def __aenter__(self) -> Uvicorn:
        self.task = asyncio.create_task(self.server.serve([self.socket]))
        await until(lambda: self.server.started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.task


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of uvicorn's imports
async def test_disconnects_behind_a_middleware_leave_nothing() -> None:
    draw, longest_s = random.Random(3), 0.1

    async def go_away(client: httpx.AsyncClient, path: str) -> None:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(draw.random() * longest_s), client.stream("GET", path) as response:
                async for _ in response.aiter_bytes():
                    pass

    async with (
        fake_async_engine(processes=True, step_time_s=0.005) as engine,
        Uvicorn(app_of(engine)) as server,
    ):
        while engine.stats()["num_aborted"] <= 5:  # on a busy machine, clients disconnect before their requests arrive
            longest_s *= 2
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
                paths = [("/stream", "/whole")[number % 2] for number in range(60)]
                await asyncio.gather(*(go_away(client, path) for path in paths))
            await drained(engine)
