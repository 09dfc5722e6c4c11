"""Grammars in Lark's syntax: what the library would compile without an end, or for very long, is refused before, and
JSON schemas in them are brought into the form that is enforced.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aioengine.constraints.json_schema import OPTIONS, Budget, compile_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RULES: Final = 1000
"""A chain of 2,500 terminals takes 8 s."""
MAX_WORK: Final = 150_000_000
"""What a parser may do behind one character, at most: about 0.1 s."""

_TOKENS: Final = re.compile(
    r"""
    (?P<comment>(?://|\#)[^\n]*)
    | "(?:\\.|[^"\\\n])*"?                          # a string
    | <[^<>\s]+>                                    # a special token
    | /(?:\\.|[^/\\])+/?                            # a regex
    | %(?P<directive>\w+)\s*(?=\{)                  # JSON follows
    | (?:\{[\s,]*|~\s*)(?P<counts>\d[\s\d.,]*)        # of repetitions
    | (?P<name>\w+)(?P<rule>(?:\[[^\[\]\n]*\])?\s*:)?   # of a rule that begins here
    | (?P<operator>[&~](?!\s*\d))
    | (?P<choice>[|?*+\[])
    """,
    re.VERBOSE | re.DOTALL,
)
_json: Final = json.JSONDecoder()


@dataclass
class _Body:
    """What stands in a rule. num_repeats: of its parts, at most."""

    num_choices: int = 1
    num_symbols: int = 0
    num_repeats: int = 1
    names: Counter[str] = field(default_factory=Counter[str])


def checked_lark(text: str) -> str:
    """A grammar, checked as far as that is not left to the library, with its JSON schemas compiled.

    Raises:
        ValueError: it has something that may not be in it.
        UnsupportedSchemaError: so has a JSON schema in it.
    """
    num_rules = position = num_copied = 0
    parts: list[str] = []
    budget = Budget()
    bodies: dict[str, _Body] = {}
    body = _Body()
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
                schema = compile_schema(json.dumps(value), budget)
                schema["x-guidance"] = {**value.get("x-guidance", {}), **OPTIONS}
                parts += (text[num_copied:start], json.dumps(schema))
                num_copied = position
        if found["rule"]:
            num_rules += 1
            body = bodies.setdefault(found["name"], _Body())
        elif found["choice"]:
            body.num_choices += 1
        elif found["counts"]:
            body.num_repeats += max(int(each[:9]) for each in re.findall(r"\d+", found["counts"]))
        elif not found["comment"]:
            body.num_symbols += 1
            body.names.update([found["name"]] if found["name"] else ())
    if num_rules > MAX_RULES:
        message = f"it has {num_rules:,} rules and terminals; at most {MAX_RULES:,} are compiled"
        raise ValueError(message)
    if _work({name: body for name, body in bodies.items() if not name.lstrip("_")[:1].isupper()}) > MAX_WORK:
        message = (
            "too many of its rules have alternatives and are used in many places, or repeated often; make it smaller"
        )
        raise ValueError(message)
    return "".join((*parts, text[num_copied:]))


def _work(bodies: Mapping[str, _Body]) -> int:
    """What the parser may do behind one character at most, where texts can be read in many ways: each alternative of a
    rule that ends there is looked up in all places that use the rule, and what follows among all that is known.
    """
    uses = Counter[str]()
    for body in bodies.values():
        for name, count in body.names.items():
            uses[name] += count * body.num_repeats
    num_places = sum(body.num_symbols * body.num_repeats for body in bodies.values())
    return num_places * sum(body.num_choices * (uses[name] + 2 * body.num_repeats) for name, body in bodies.items())
