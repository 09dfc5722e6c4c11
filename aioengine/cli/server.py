"""The server of ``aioengine serve``: the router of ``aioengine.openai`` in an app of its own.

It answers ``/health`` and ``/ready`` while the model is loaded. On SIGTERM, new requests are refused, open ones may end
within ``DRAIN_S``, and the server stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import uvicorn

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError
from aioengine.openai import openai_router
from aioengine.openai.router import app_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette

    from aioengine.cli.flags import Arguments

DRAIN_S: Final = 30
NUM_ACCEPTED: Final = 16
"""Connections that are accepted in one iteration of the loop."""
KEY_VARIABLE: Final = "AIOENGINE_API_KEY"


def run_server(arguments: Arguments) -> int:
    """Serve a model until a signal ends the server, and return the exit status.

    Raises:
        EngineError, ValueError: the engine could not start, or died.
        OSError: the address cannot be used.
    """
    engine = AsyncEngine.from_config(arguments.config())
    keys = arguments.api_key or list(filter(None, [os.environ.get(KEY_VARIABLE)])) or None
    router = openai_router(
        engine,
        api_key=keys,
        served_model_name=arguments.served_model_name,
        tool_parser=_parser(arguments.tool_parser),
        reasoning_parser=_parser(arguments.reasoning_parser),
    )
    results: list[BaseException | None] = []

    async def run_engine() -> BaseException | None:
        try:
            await engine.start()
            await engine.freeze_gc()  # a collection of all modules would stop the streams for 70 ms
            print(f"serving at http://{_address(listening)}/v1", flush=True)
            return await engine.wait_failed()
        finally:
            server.should_exit = True

    async def drain() -> None:
        with suppress(EngineClosedError):  # it is still starting
            await engine.drain(DRAIN_S)
        server.should_exit = True

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(run_engine())]
        stop = lambda: tasks.append(asyncio.create_task(drain()))  # noqa: E731  # the list keeps the task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        yield
        await engine.shutdown()
        results.extend(await asyncio.gather(*tasks, return_exceptions=True))

    app = app_of(router, lifespan)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S)
    )
    # A second Ctrl-C cancels all tasks, and uvicorn would log a traceback for each.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not server.force_exit)
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    with socket.create_server((arguments.host, arguments.port), family=family) as listening:
        # In an iteration of its loop, uvloop accepts one connection per socket. Under load, an iteration takes some
        # milliseconds, so with one socket the last of 256 new clients would wait for a second.
        server.run(sockets=[listening, *(listening.dup() for _ in range(NUM_ACCEPTED - 1))])
    for error in results:
        if error is not None and not isinstance(error, EngineClosedError):  # raised by a shutdown during the start
            raise error
    return 0


def _parser(name: str) -> str | None:
    return None if name == "none" else name


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
