"""The page at /: a chat with the model, and the load of the engine. It is one file, and asks no other host."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request  # FastAPI reads the annotations
from starlette.responses import HTMLResponse, Response

from aioengine.openai.http_call import HttpCall
from aioengine.openai.replies import json_response

FILE: Final = Path(__file__).with_name("page.html")

_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(_: Request) -> Response:
    """Return the page. It has no secrets: it asks the user for the API key."""
    return HTMLResponse(FILE.read_bytes(), headers=_HEADERS)


async def load(call: HttpCall) -> Response:
    """Answer a request to /load: the state and the counters of the engine, for the page."""
    return json_response({"state": call.model.readiness, **call.model.engine.stats()})
