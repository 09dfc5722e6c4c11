"""Grammars in Lark's syntax that their compiler would not end with."""

from __future__ import annotations

import pytest

from aioengine.constraints.gbnf import convertible
from aioengine.constraints.grammars import GrammarError
from aioengine.constraints.lark import checked_lark
from tests.kit.grammar_walks import accepts, allowed, demo_grammars, grammar_of, token_bytes, walk


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
def test_a_grammar_that_takes_long_is_refused_before_it_is_compiled(text: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)


def rules_of_each_other(number: int) -> str:
    """Each may be empty, and begins with another one."""
    rules = [f"a{i}: a{(i + 1) % number} start | /[a-z]/ start | " for i in range(number)]
    return "\n".join([f"start: {' | '.join(f'a{i}' for i in range(number))}", *rules])


def rules_of_all(number: int) -> str:
    """Each is any of all."""
    names = " | ".join(f"a{i}" for i in range(number))
    return "\n".join(["start: a0", *(f'a{i}: {names} | "x"' for i in range(number))])


@pytest.mark.parametrize(
    "text",
    [rules_of_each_other(300), rules_of_all(100), "start: (" + '"a"? ' * 40 + '| "b"){900}', "start: " + '"a"{60000}'],
)
def test_rules_that_could_be_read_in_too_many_ways_are_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="too many of its rules have alternatives"):
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root root root root | [a-z]* | ""',
        "start: a* \na: a a | /[a-z]/ | b |\nb: a a a | b b |",
    ],
)
def test_a_text_that_can_be_read_in_too_many_ways_ends(text: str) -> None:
    constraint = demo_grammars().open(grammar_of(ebnf=text), [], 0)
    token_id = token_bytes().index(b"a")
    for _ in range(200):
        if constraint.error or not allowed(constraint):
            break
        constraint.advance(token_id)
    assert "more work than is allowed" in constraint.error


def test_many_alternatives_and_rules_that_are_used_often_are_allowed() -> None:
    words = "start: (word space)*\nspace: " + '" "\nword: ' + " | ".join(f"w{i}" for i in range(400))
    words += "".join(f'\nw{i}: "w{i}" /[a-z]/* space?' for i in range(400))
    names = "start: T+\nT: " + " | ".join(f'"{i} "' for i in range(3000))
    for text in (words, names, 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]{1,9}/ ~ 1..3 | "-"{2} e'):
        walk(grammar_of(ebnf=text), 0, max_tokens=20)


def test_letters_of_gbnf_may_be_escaped() -> None:
    grammar = grammar_of(ebnf=r'root ::= "\u00e9\\u00e9" [\u00e9-\u00ff] "\U0001F600" "\u20ac"')
    assert accepts(grammar, r"é\u00e9ê😀€")
    letters = grammar_of(ebnf=r'root ::= "\u0041\u000a\u0022" [\u0041-\u005a] "\U00000061"')
    assert accepts(letters, 'A\n"Za')
    assert not accepts(letters, 'A\n"za')
    assert not accepts(grammar, r"é\u00e9a😀€")


@pytest.mark.parametrize(
    ("text", "fits", "does_not"),
    [
        ('root ::= ([a-z]+)? "!"', ["!", "ab!"], ["a1!", "ab"]),
        ('root ::= "<" (([ab]{2})*)+ ">"', ["<>", "<abba>"], ["<aba>"]),
        ('root ::= ( # ) of (it)\n word+\n )? "(" (([)]*)?)*\nword ::= "a" | "[" word "]"', ["(", "a[a]())"], ["[a("]),
        ('root ::= ("x"+)?\nrepeated-0 ::= "y"', ["", "xx"], ["y"]),
        ('root ::= ("a" "b"+)? ("c"+ | "d")* [(+)]+', ["(", "abbccd)+"], ["aab(", "b("]),
    ],
)  # fmt: skip
def test_repetitions_of_repetitions_are_read_in_gbnf(text: str, fits: list[str], does_not: list[str]) -> None:
    grammar = grammar_of(ebnf=text)
    assert [each for each in fits if not accepts(grammar, each)] == []
    assert [each for each in does_not if accepts(grammar, each)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (rules_of_each_other(300), "too many of its rules"),
        ("root ::= (", "it is read neither as GBNF nor as Lark: "),
        ('start: "a" & "b"', "'&' of terminals"),
    ],
)
def test_an_error_starts_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(GrammarError) as caught:
        demo_grammars().compile(grammar_of(ebnf=text)).result(timeout=60)
    assert str(caught.value).startswith(why)


def test_a_text_is_read_once() -> None:
    for part in ("(", "(a)+", "((a", '"', "{ ", "{1", "a", "# ", "[", ")"):
        convertible("root ::= " + part * 30_000)
    checked_lark('start: "' + '\\"' * 30_000)
    checked_lark("start: /" + "\\/" * 30_000)
    for part in ("<", "a", "a[", "% ", "%a", "a ", "{", "{1", "{ 1,", "1"):
        checked_lark(part * 30_000)
