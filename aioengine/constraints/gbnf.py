"""Grammars in GBNF, before the library converts them to Lark's syntax: what it would convert wrongly is rewritten."""

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
    """A grammar whose meaning the library's conversion keeps; one that is not in GBNF as it is."""
    return _without_nested_repetitions(_with_plain_letters(text)) if "::=" in text else text


def _with_plain_letters(text: str) -> str:
    """Its letters have no escapes but short ones: the library drops zeros of ``\\u00e9``."""

    def plain(found: re.Match[str]) -> str:
        code = int(found[1] or found[2] or "0", 16)
        if code < 0x80 and (found[1] or found[2]):
            return f"\\x{code:02x}"
        is_letter = 0x80 <= code < 0xD800 or 0xE000 <= code < 0x110000
        return chr(code) if is_letter else found[0]

    return _LONG_ESCAPES.sub(plain, text)


@dataclass
class _Parentheses:
    """What stands between parentheses, or outside of all.

    num_items: behind each other. start: of the last of them, in ``parts``. is_repeated: the last one is a repetition,
    perhaps in parentheses.
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
    """A group of one repetition that is itself repeated, such as ``(x+)?``, becomes a rule: the library would drop its
    parentheses.
    """
    name = "repeated"
    while name in text.lower():
        name += "-x"
    rules: list[str] = []
    group = _Parentheses()
    around: list[_Parentheses] = []
    for found in _TOKENS.finditer(text):
        token = found[0]
        if found["item"]:
            group.add(token, is_repeated=False)
        elif token == "(":
            around.append(group)
            group = _Parentheses(["("])
        elif token == ")" and around:
            group.parts.append(")")
            inner, group = group, around.pop()
            group.add("".join(inner.parts), is_repeated=inner.is_repeated and inner.num_items == 1)
        else:
            if found["repetition"] and group.is_repeated and group.parts[group.start].startswith("("):
                rules.append(f"\n{name}-{len(rules)} ::= {group.parts[group.start]}")
                group.parts[group.start] = f"{name}-{len(rules) - 1}"
            if not found["space"]:
                group.is_repeated = bool(found["repetition"])
            if token == "|":
                group.num_items += 1
            group.parts.append(token)
    return "".join(part for each in (*around, group) for part in each.parts) + "".join(rules)
