"""How the messages of a chat are to be written: the arguments of ``chat`` about its template, checked at the call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, cast

from msgspec import Struct

from aioengine import checks
from aioengine.chat_template import MAX_TEMPLATE_BYTES, VARIABLES, template_variables

CHAT_ARGUMENTS: Final = ("chat_template", VARIABLES, "enable_thinking", "tools")
MAX_TOOLS: Final = 1024
MAX_NODES: Final = 4096
MANY_CHARACTERS: Final = 1024 * 1024
"""More than a call looks at."""

_THINKING: Final = "enable_thinking"


class ChatForm(Struct, frozen=True):
    """How a conversation is written.

    template: text, name or file of the chat template; None: the model's own. num_characters: about, of the tools and
    variables.
    """

    template: str | os.PathLike[str] | None = None
    tools: list[dict[str, object]] | None = None
    variables: dict[str, object] = {}
    num_characters: int = 0


def chat_form(options: Mapping[str, object]) -> ChatForm:
    """What the keyword arguments of ``chat`` say. Files, and what is nested in tools, are looked at later.

    Raises:
        TypeError, ValueError: what is wrong, with the field and the value.
    """
    given = {name: options[name] for name in CHAT_ARGUMENTS if options.get(name) is not None}
    if not given:
        return ChatForm()
    variables = template_variables({name: given[name] for name in (VARIABLES, _THINKING) if name in given})
    if _THINKING in variables:
        checks.switch(_THINKING, variables[_THINKING])
    tools = _tools(given["tools"]) if "tools" in given else None
    return ChatForm(_template(given.get("chat_template")), tools, variables, _num_characters([tools, variables]))


def _template(value: object) -> str | os.PathLike[str] | None:
    """A text is never a path here: it may come from a client, who must not choose a file to be read."""
    if value is None or isinstance(value, os.PathLike):
        return cast("os.PathLike[str] | None", value)
    if not isinstance(value, str):
        raise checks.wrong_type("chat_template", "the text or the name of a chat template, or a pathlib.Path", value)
    return checks.text("chat_template", value, max_bytes=MAX_TEMPLATE_BYTES)


def _tools(value: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    given = checks.items("tools", value, MAX_TOOLS, allowed="a list of dicts in JSON schema form")
    for place, tool in enumerate(given):
        if not isinstance(tool, Mapping):
            raise checks.wrong_type(f"tools[{place}]", "a dict in JSON schema form", tool)
        found.append(dict(cast("Mapping[str, object]", tool)))
    return found


def _num_characters(value: object) -> int:
    """About the characters of nested data; ``MANY_CHARACTERS`` where it has more parts than a call looks at."""
    waiting, num_characters = [value], 0
    for _ in range(MAX_NODES):
        if not waiting:
            return num_characters
        each = waiting.pop()
        if isinstance(each, Mapping):
            given = cast("Mapping[object, object]", each)
            waiting += [*given, *given.values()]
        elif isinstance(each, list | tuple):
            waiting += cast("Sequence[object]", each)
        else:
            num_characters += str.__len__(each) if isinstance(each, str) else 1
    return MANY_CHARACTERS
