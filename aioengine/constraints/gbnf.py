"""Rewrite grammars in GBNF so that the library converts them to Lark's syntax without changing their meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_LONG_ESCAPES: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_TOKENS: Final = re.compile(
    r"""
    (?P<space>\s+|\#[^\n]*)
    | (?P<repetition>[*+?]|\{[\s\d,]*\})
    | (?P<other>::=|[|()])
    | (?P<item>"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|[\w-]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def convertible(text: str) -> str:
    """Return a grammar that the library converts correctly. Text that is not GBNF stays as it is."""
    return _without_nested_repetitions(_LONG_ESCAPES.sub(_short_escape, text)) if "::=" in text else text


def lark_names(text: str) -> dict[str, str]:
    """Return the names of the rules in GBNF, by the names that the library gives them in Lark's syntax."""
    names = {_lark_name(name): name for name in re.findall(r"([\w-]+)\s*::=", text)}
    return {**names, "start": names.get("root", "start")}


def _lark_name(name: str) -> str:
    return re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def _short_escape(escape: re.Match[str]) -> str:
    """Replace a long escape by the letter or a short escape, because the library drops the zeros of ``\\u00e9``."""
    digits = escape[1] or escape[2]
    code = int(digits or "0", 16)
    if digits and code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000 else escape[0]


@dataclass
class _Parentheses:
    """The text between two parentheses, or outside of all parentheses.

    num_items: number of items in sequence. start: index in ``parts`` of the last item. is_repeated: the last item is a
    repetition, perhaps in parentheses.
    """

    parts: list[str] = field(default_factory=list[str])
    num_items: int = 0
    start: int = 0
    is_repeated: bool = False

    def add(self, item: str, *, is_repeated: bool) -> None:
        self.num_items += 1
        self.start = len(self.parts)
        self.is_repeated = is_repeated
        self.parts.append(item)


def _without_nested_repetitions(text: str) -> str:
    """Make a rule of each repeated group that is only a repetition, such as ``(x+)?``. The library would drop its
    parentheses.
    """
    name = "repeated"
    while name in text.lower():
        name += "-x"
    rules: list[str] = []
    group = _Parentheses()
    outer: list[_Parentheses] = []
    for match in _TOKENS.finditer(text):
        token = match[0]
        if match["item"]:
            group.add(token, is_repeated=False)
        elif token == "(":
            outer.append(group)
            group = _Parentheses(["("])
        elif token == ")" and outer:
            group.parts.append(")")
            inner, group = group, outer.pop()
            group.add("".join(inner.parts), is_repeated=inner.is_repeated and inner.num_items == 1)
        else:
            if match["repetition"] and group.is_repeated and group.parts[group.start].startswith("("):
                rules.append(f"\n{name}-{len(rules)} ::= {group.parts[group.start]}")
                group.parts[group.start] = f"{name}-{len(rules) - 1}"
            if not match["space"]:
                group.is_repeated = bool(match["repetition"])
            if token == "|":
                group.num_items += 1
            group.parts.append(token)
    return "".join(part for level in (*outer, group) for part in level.parts) + "".join(rules)
