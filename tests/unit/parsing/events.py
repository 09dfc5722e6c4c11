"""Events of a parser, in a short form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aioengine.parsing import Content, OutputFormat, Reasoning, ToolArguments, ToolCallBegin
from aioengine.parsing._events import Event

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]


def joined(events: Iterable[Event]) -> list[tuple[str, ...]]:
    """Return the events with neighboring pieces joined: ("content", text), ("reasoning", text), ("call", name,
    arguments). A call without an end has a question mark."""
    parts: list[tuple[str, ...]] = []
    for event in events:
        if isinstance(event, Content | Reasoning):
            kind = "content" if isinstance(event, Content) else "reasoning"
            if parts and parts[-1][0] == kind:
                parts[-1] = (kind, parts[-1][1] + event.text)
            else:
                parts.append((kind, event.text))
        elif isinstance(event, ToolCallBegin):
            assert event.index == sum(part[0] == "call" for part in parts)
            parts.append(("call?", event.name, ""))
        else:
            kind, name, arguments = parts[-1]
            assert kind == "call?"
            assert event.index == sum(part[0] == "call" for part in parts)
            is_piece = isinstance(event, ToolArguments)
            parts[-1] = ("call?", name, arguments + event.text) if is_piece else ("call", name, arguments)
    return parts


def parsed(form: OutputFormat, pieces: Iterable[str], tools: list[Any] | None = None, prompt: str = "") -> Any:
    parser = form.parser(tools=TOOLS if tools is None else tools, prompt=prompt)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    assert parser.flush() == []
    return joined(events)
