"""Grammars in the syntax of Lark: refuse grammars that take too long, and compile their JSON schemas."""

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
"""Maximum work of the parser for one character, as estimated by ``_work``: about 0.1 s."""

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
    """The body of a rule. num_repeats: maximum repetitions of its parts. names: the rules that it uses."""

    num_choices: int = 1
    num_symbols: int = 0
    num_repeats: int = 1
    names: Counter[str] = field(default_factory=Counter[str])


def checked_lark(text: str) -> str:
    """Check a grammar before the library compiles it, and return it with compiled JSON schemas.

    Raises:
        ValueError: it has a part that is not supported, or is too large.
        UnsupportedSchemaError: a JSON schema in it cannot be enforced.
    """
    num_rules = position = num_copied = 0
    parts: list[str] = []
    budget = Budget()
    bodies: dict[str, _Body] = {}
    body = _Body()
    while match := _TOKENS.search(text, position):
        start = position = match.end()
        if match["operator"]:
            raise ValueError(f"{match['operator']!r} of terminals is not supported: it may take any time to compile")
        if match["directive"]:
            try:
                value, position = _json.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"no JSON follows %{match['directive']}: {error}") from None
            if match["directive"] == "json":
                schema = compile_schema(json.dumps(value), budget)
                schema["x-guidance"] = {**value.get("x-guidance", {}), **OPTIONS}
                parts += (text[num_copied:start], json.dumps(schema))
                num_copied = position
        if match["rule"]:
            num_rules += 1
            body = bodies.setdefault(match["name"], _Body())
        elif match["choice"]:
            body.num_choices += 1
        elif match["counts"]:
            body.num_repeats += max(int(digits[:9]) for digits in re.findall(r"\d+", match["counts"]))
        elif not match["comment"]:
            body.num_symbols += 1
            body.names.update([match["name"]] if match["name"] else ())
    if num_rules > MAX_RULES:
        raise ValueError(f"it has {num_rules:,} rules and terminals; at most {MAX_RULES:,} are compiled")
    if _work({name: body for name, body in bodies.items() if not name.lstrip("_")[:1].isupper()}) > MAX_WORK:
        raise ValueError(
            "too many of its rules have alternatives and are used in many places, or repeated often; make it smaller"
        )
    return "".join((*parts, text[num_copied:]))


def _work(bodies: Mapping[str, _Body]) -> int:
    """Estimate the maximum work of the parser for one character, if the text can be parsed in many ways.

    For each alternative of a rule that ends there, the parser looks at all places that use the rule, and searches the
    continuation among all known items.
    """
    uses = Counter[str]()
    for body in bodies.values():
        for name, count in body.names.items():
            uses[name] += count * body.num_repeats
    num_places = sum(body.num_symbols * body.num_repeats for body in bodies.values())
    return num_places * sum(body.num_choices * (uses[name] + 2 * body.num_repeats) for name, body in bodies.items())
