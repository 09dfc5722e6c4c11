"""Messages of OpenAI's form, as chat templates read them."""

from __future__ import annotations

from typing import Any, Final

from msgspec import DecodeError
from msgspec.json import decode

from aioengine.openai.replies import CallError

_URLS: Final = ("http://", "https://", "data:")


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat as chat templates read them.

    Raises:
        CallError: an image is not given as a URL. Clients must not read files of the server.
    """
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if message.get("role") == "developer":  # OpenAI's new name, which few templates know
        message["role"] = "system"
    if isinstance(message.get("content"), list):
        message["content"] = [_part(f"{name}.content[{place}]", part) for place, part in enumerate(message["content"])]
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _part(name: str, part: object) -> object:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            if not url.lower().startswith(_URLS):
                raise CallError(f"{name} has the URL {url[:100]!r}; an image is a http, https or data URL")
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "text"}:
            return part
        case {"type": kind}:
            raise CallError(f"{name} is of type {str(kind)[:100]!r}; allowed: text, image_url, refusal")
        case _:
            raise CallError(f"{name} must be an object with a type")


def _tool_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates expect."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                return {**call, "function": {**function, "arguments": decode(text or "{}")}}
            except (DecodeError, RecursionError):  # templates get it as text
                return call
        case _:
            return call
