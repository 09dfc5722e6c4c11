"""Check grammars in Lark's syntax before llguidance compiles them, and compile their JSON schemas.

llguidance converts GBNF to this syntax. We change escapes that it reads wrongly, and keep the names of rules.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aioengine.api import checks
from aioengine.constraints.endless_rules import endless_rule
from aioengine.constraints.json_schema import OPTIONS, Budget, compile_schema
from aioengine.errors import UnsupportedSchemaError

MAX_RULES: Final = 1000
"""A chain of 2,500 terminals takes 8 s."""
MAX_WORK: Final = 150_000_000
"""Maximum work of the parser for one character, as estimated by ``_work``: about 0.1 s."""

_TOKENS: Final = re.compile(
    r"""
    (?P<skipped>(?://|\#)[^\n]*|->\s*[\w-]+)            # a comment, or an alias
    | ^[ \t]*(?:(?P<statement>%ignore|%import)\b        # a rule begins in each line with a colon
        | [!?]*(?P<rule>[\w-]++)(?:"(?:\\.|[^"\\\n])*+"|/(?:\\.|[^/\\])++/|::|[^":/\n])*+:)
    | "(?:\\.|[^"\\\n])*+"?i?                           # a string
    | <[^<>\s]+>                                        # a special token
    | /(?:\\.|[^/\\])++/?[imslux]*                      # a regex
    | %(?P<directive>\w+)\s*(?=\{)                      # JSON follows
    | (?P<counts>\{[\s\d.,+-]+|~\s*[+\d][\s\d.,+-]*)    # of repetitions
    | (?P<parameter>::|%if\b)
    | (?P<name>[\w-]+)
    | (?P<operator>[&~])
    | (?P<mark>[|?*+()\[\]])
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_FROM_ZERO: Final = re.compile(r"[{~]\s*(?:,|-|\+?0+(?!\d))")
"""``counts`` that allow no repetition at all."""
_json: Final = json.JSONDecoder()


@dataclass
class _Body:
    """The body of a rule. num_repeats: maximum repetitions of its parts. names: the rules that it uses."""

    num_choices: int = 1
    num_symbols: int = 0
    num_repeats: int = 1
    names: Counter[str] = field(default_factory=Counter[str])


def checked_lark(text: str, names: Mapping[str, str]) -> str:
    """Check a grammar before llguidance compiles it, and return it with compiled JSON schemas.

    names: the user's names of rules, by their names in ``text``, if they differ.

    Raises:
        ValueError: it has a part that is not supported, is too large, or no text completes it.
        UnsupportedSchemaError: a JSON schema in it cannot be enforced.
    """
    position = num_copied = 0
    parts: list[str] = []
    budget = Budget()
    body = _Body()
    bodies: dict[str, _Body] = {}
    alternatives: dict[str, list[list[str]]] = {"": [[]]}
    """The symbols in each alternative of the rules, and of the groups in brackets."""
    open_names = [""]
    """The current rule, and the groups that are open."""
    is_parametric = False
    while token := _TOKENS.search(text, position):
        start = position = token.end()
        kind, mark = token.lastgroup, token["mark"]
        symbols = alternatives[open_names[-1]][-1]
        if kind == "operator":
            raise ValueError(f"{token[0]!r} of terminals is not supported: it may take any time to compile")
        if kind in ("rule", "statement"):
            body = bodies.setdefault(token[kind], _Body())
            open_names = [token[kind]]
            alternatives.setdefault(token[kind], []).append([])
        elif kind == "counts":
            body.num_repeats += max((int(digits[:9]) for digits in re.findall(r"\d+", token[0])), default=1)
            if _FROM_ZERO.match(token[0]):
                del symbols[-1:]
        elif kind == "mark":
            if mark in "|?*+[":
                body.num_choices += 1
            if mark == "|":
                alternatives[open_names[-1]].append([])
            elif mark in "?*":
                del symbols[-1:]
            elif mark in "([":
                group = f"({start}"
                symbols.append(group)
                open_names.append(group)
                alternatives[group] = [[]] if mark == "(" else [[], []]
            elif mark in ")]" and len(open_names) > 1:
                open_names.pop()
        elif kind == "parameter":
            is_parametric = True
        elif kind != "skipped":
            body.num_symbols += 1
            symbols.append(token[0])
            if kind == "name":
                body.names[token[0]] += 1
        if kind == "directive":
            try:
                value, position = _json.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"no JSON follows %{token[kind]}: {error}") from None
            if token[kind] == "json":
                try:
                    schema = compile_schema(json.dumps(value), budget)
                except UnsupportedSchemaError as error:
                    message = f"in the schema after its %json, {checks.cut(str(error))}"
                    raise UnsupportedSchemaError(message, pointer=error.pointer, keyword=error.keyword) from None
                schema["x-guidance"] = {**value.get("x-guidance", {}), **OPTIONS}
                parts += (text[num_copied:start], json.dumps(schema))
                num_copied = position
    if len(bodies) > MAX_RULES:
        raise ValueError(f"it has {len(bodies):,} rules and terminals; at most {MAX_RULES:,} are compiled")
    if _work({name: body for name, body in bodies.items() if not name.lstrip("_")[:1].isupper()}) > MAX_WORK:
        raise ValueError("too many rules with alternatives are used in many places or repeated often; make it smaller")
    # The conditions of parametric rules decide which alternatives are used.
    if not is_parametric and (name := endless_rule(alternatives, "start")) is not None:
        shown = checks.shown(names.get(name, name))
        raise ValueError(f"the rule {shown} can never end: each alternative repeats rules endlessly; add one that ends")
    return "".join((*parts, text[num_copied:]))


def _work(bodies: Mapping[str, _Body]) -> int:
    """Estimate the maximum work of the parser for one character, if the text can be parsed in many ways.

    For each alternative that ends at this character, the parser looks at all places that use its rule, and searches the
    continuation among all known items.
    """
    uses = Counter[str]()
    for body in bodies.values():
        for name, count in body.names.items():
            uses[name] += count * body.num_repeats
    num_places = sum(body.num_symbols * body.num_repeats for body in bodies.values())
    return num_places * sum(body.num_choices * (uses[name] + 2 * body.num_repeats) for name, body in bodies.items())


# ---------------------------------------------------------------- GBNF


_LONG_ESCAPES: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def with_short_escapes(text: str) -> str:
    """Replace long escapes in GBNF, because llguidance drops the zeros of ``\\u00e9``. Other text stays as it is."""
    return _LONG_ESCAPES.sub(_short_escape, text) if "::=" in text else text


def _short_escape(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    code = int(digits or "0", 16)
    if digits and code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000 else escape[0]


def lark_names(text: str) -> dict[str, str]:
    """Return the names of the rules in GBNF, by the names that llguidance gives them in Lark's syntax."""
    names = {
        re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower(): name
        for name in re.findall(r"(?<![\w-])([\w-]++)\s*+::=", text)
    }
    return {**names, "start": names.get("root", "start")}
