"""OpenAI's API as a deployment of Ray Serve (`pip install 'aioengine[ray,server]' 'ray[serve]'`).

python examples/ray_serve.py --port 8000 --dp-size 2
curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "The capital of France is"}'

The deployment has the frontend of an engine. The replicas of the model are on the nodes of the Ray cluster. If a node
with a replica is lost, its streams continue in the other replicas.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve

from aioengine import AsyncEngine
from aioengine.openai import openai_router


def application(**arguments: Any) -> serve.Application:
    """Return the application of an engine with these arguments."""

    def make_app() -> FastAPI:  # runs in the process of the deployment
        engine = AsyncEngine(executor="ray", **arguments)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with engine:
                yield

        app = FastAPI(lifespan=lifespan)
        app.include_router(openai_router(engine))
        return app

    # Requests wait in the queue of the engine, which knows their deadlines, and not in Ray's.
    return serve.deployment(serve.ingress(make_app)(), name="aioengine", max_ongoing_requests=10_000).bind()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model-path")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--load-balance-method", default="auto")
    flags = vars(parser.parse_args())
    serve.start(http_options={"host": flags.pop("host"), "port": flags.pop("port")})
    serve.run(application(**flags), blocking=True)


if __name__ == "__main__":
    main()
