"""A real server for the tests of a module: uvicorn and an engine on a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from aioengine import AsyncEngine
from aioengine.openai import openai_router
from tests.kit.waiting import wait_until


class Served:
    """A running server.

    Attributes:
        url: without a path. engine: belongs to the loop of the server's thread; ``stats()`` works from any thread.
    """

    def __init__(self, engine: AsyncEngine, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.url = url
        self.loop = loop
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def wait_until_idle(self) -> None:
        names = ("num_running", "num_waiting", "num_streams", "num_detokenizing")
        assert wait_until(lambda: not any(self.engine.stats()[name] for name in names)), self.engine.stats()


@contextmanager
def served(engine: AsyncEngine, **options: Any) -> Iterator[Served]:
    """Serve the router of an engine until the end of the block."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(openai_router(engine, **options))
    with app_served(app, engine) as running:
        yield running


@contextmanager
def app_served(app: FastAPI, engine: AsyncEngine) -> Iterator[Served]:
    """Serve an app until the end of the block."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # asyncio does not set it for such a socket, and a response then waits 40 ms for the client's acknowledgment.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=lambda: run(loop, server.serve(sockets=[listening])))
        thread.start()
        try:
            assert wait_until(lambda: server.started or not thread.is_alive(), 90)
            running = Served(engine, f"http://127.0.0.1:{listening.getsockname()[1]}", loop)
            with running.client:
                yield running
        finally:
            server.should_exit = True
            thread.join(30)


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(coroutine)
