"""Grammars in Lark's syntax: what the library would compile without an end, or for very long, is refused before, and
JSON schemas in them are brought into the form that is enforced.
"""

from __future__ import annotations

import json
import re
from typing import Final

from aioengine.constraints.json_schema import OPTIONS, Budget, compiled

MAX_RULES: Final = 1000
"""A chain of 2,500 terminals takes 8 s."""

_TOKENS: Final = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"?                            # a string
    | <[^<>\s]+>                                    # a special token
    | (?://|\#)[^\n]*                               # a comment
    | /(?:\\.|[^/\\])+/?                            # a regex
    | %(?P<directive>\w+)\s*(?=\{)                  # JSON follows
    | \w+(?P<rule>(?:\[[^\[\]\n]*\])?\s*:)?         # a name, of a rule that begins here
    | (?P<operator>[&~](?!\s*\d))
    """,
    re.VERBOSE | re.DOTALL,
)
_json: Final = json.JSONDecoder()


def checked_lark(text: str) -> str:
    """A grammar, checked as far as that is not left to the library, with its JSON schemas compiled.

    Raises:
        ValueError: it has something that may not be in it.
        UnsupportedSchemaError: so has a JSON schema in it.
    """
    num_rules = position = num_copied = 0
    parts: list[str] = []
    budget = Budget()
    while found := _TOKENS.search(text, position):
        start = position = found.end()
        if found["operator"]:
            message = f"{found['operator']!r} of terminals is not supported: it may take any time to compile"
            raise ValueError(message)
        if found["directive"]:
            try:
                value, position = _json.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                message = f"no JSON follows %{found['directive']}: {error}"
                raise ValueError(message) from None
            if found["directive"] == "json":
                schema = compiled(json.dumps(value), budget)
                schema["x-guidance"] = {**value.get("x-guidance", {}), **OPTIONS}
                parts += (text[num_copied:start], json.dumps(schema))
                num_copied = position
        num_rules += found["rule"] is not None
    if num_rules > MAX_RULES:
        message = f"it has {num_rules:,} rules and terminals; at most {MAX_RULES:,} are compiled"
        raise ValueError(message)
    return "".join((*parts, text[num_copied:]))
