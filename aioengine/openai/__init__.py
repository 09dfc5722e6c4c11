"""HTTP endpoints of OpenAI and Anthropic for an engine, as a router of FastAPI (extra ``server``).

    app.include_router(openai_router(engine))

A thin layer over the public API of the engine: each endpoint reads a body, makes one call, and writes its result.
"""

from aioengine.openai.router import openai_router

__all__ = ["openai_router"]
