"""Grammars in Lark's syntax that their compiler would not end with."""

from __future__ import annotations

import pytest

from aioengine.constraints.lark import checked_lark
from aioengine.grammars import GrammarError
from tests.kit.grammar_walks import demo_grammars, grammar_of


@pytest.mark.parametrize(
    "text",
    [
        "start: T\nT: /(x{7})*/ & /(x{11})*/",
        'start: "a"\nT: ~/.*c.*/',
        'start: /a\n"/ & /b"/',
        'start: <"> & "b"',
        'start: "\\" & " & "b"',
        'start: %json {"const": "}"} & "b"',
    ],
)
def test_operators_of_terminals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of terminals is not supported"):
        checked_lark(text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "&~" // & ~\n | /[^&]~/ # &',
        'start: "a" ~ 3..5 | "b"~2 | "c"{4}',
        'start: <|a&b|>\nr[stop="&"]: /.*/',
        'start: T\nT: %regex {"substring_words": "a & ~ b"}',
        'start: %json {"enum": ["&", "~"]}',
    ],
)
def test_other_uses_of_their_characters_are_not(text: str) -> None:
    checked_lark(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: T0\n' + "".join(f'T{i}: T{i + 1} | "{i}"\n' for i in range(1500)), "at most 1,000"),
        ("root ::= r0\n" + "".join(f'r{i} ::= r{i + 1}\n' for i in range(1500)) + 'r1500 ::= "a"', "at most 1,000"),
        ('start: %json {"type": "integer", "multipleOf": 1000003}', "in the schema behind its %json, 'multipleOf'"),
        ('start: %json {"type": "integer", "multiple\\u004ff": 1000003}', "in the schema behind its %json, "),
        ('start: %json {"a": ', "no JSON follows %json"),
        ('start: T\nT: "a" & "b"', "of terminals is not supported"),
    ],
)  # fmt: skip
def test_what_would_take_long_is_refused_before_it_is_compiled(text: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=20)


def test_a_text_is_read_once() -> None:
    checked_lark('start: "' + '\\"' * 30_000)
    checked_lark("start: /" + "\\/" * 30_000)
    for part in ("<", "a", "a[", "% ", "%a", "a "):
        checked_lark(part * 30_000)
