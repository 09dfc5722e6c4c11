"""Rows of a batch in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from aioengine.api import checks
from aioengine.api.engine import AsyncEngine
from aioengine.api.jobs import Row, failure
from aioengine.api.journal import openai_id
from aioengine.errors import EngineClosedError
from aioengine.openai import openai_router
from aioengine.openai.router import app_of

_OVERLOADED: Final = 429
_UNAVAILABLE: Final = 503


class OpenAIRows:
    """Answers rows as ``aioengine serve`` answers requests: by its app, without a socket."""

    def __init__(self, engine: AsyncEngine, model_names: Sequence[str] | None) -> None:
        app = app_of(openai_router(engine, served_model_name=model_names))
        self._engine = engine
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://aioengine",
            timeout=None,
            follow_redirects=False,
        )

    async def answer(self, index: int, item: Mapping[str, Any]) -> tuple[Row, int]:
        """Return the row of an item in OpenAI's form, and the number of its output tokens.

        Raises:
            EngineError: the engine has ended.
        """
        row = {"id": openai_id(index), "custom_id": item.get("custom_id"), "response": None, "error": None}
        try:
            response = await self._post(*_call_of(item))
        except (ValueError, httpx.InvalidURL) as error:
            return {**row, "error": {"code": "invalid_request", "message": failure(error)["message"]}}, 0
        is_json = response.headers.get("content-type") == "application/json"
        # otherwise an endpoint raised an error that it does not expect
        body: Any = response.json() if is_json else {"error": {"message": response.text}}
        request_id = response.headers.get("x-request-id")
        row["response"] = {"status_code": response.status_code, "request_id": request_id, "body": body}
        return row, (body.get("usage") or {}).get("completion_tokens", 0)

    async def _post(self, url: str, body: Mapping[str, Any]) -> httpx.Response:
        while True:
            response = await self._client.post(url, json=body)
            if response.status_code == _UNAVAILABLE and not self._engine.is_alive:
                raise await self._engine.wait_failed() or EngineClosedError("the engine was shut down")
            if response.status_code != _OVERLOADED:
                return response
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))


def _call_of(item: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the path and the body of a row. Raises ValueError if they are wrong."""
    method, url, body = item.get("method", "POST"), item["url"], item["body"]
    if method != "POST":
        raise ValueError(f"method must be POST, got {checks.shown(method)}")
    if not isinstance(url, str) or not url.startswith("/v1/"):
        raise ValueError(f"url must be a path such as /v1/chat/completions, got {checks.shown(url)}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, got {checks.shown(body)}")
    if body.get("stream"):
        raise ValueError("a row is answered as a whole; leave out stream")
    return url, body
