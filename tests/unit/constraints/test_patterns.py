"""Stop patterns of callers: costly patterns are refused before they are compiled, and common ones are accepted."""

from __future__ import annotations

import sys

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from aioengine.api.checks import MAX_PATTERN_BYTES
from aioengine.api.params import SamplingParams
from aioengine.constraints import patterns
from aioengine.constraints.patterns import MAX_SIZE, PatternCache, check_patterns, compile_pattern, expanded_size

MAX_COMPILED_BYTES = 16 << 20
"""Twice the memory of the largest pattern that is accepted."""

REPETITIONS = [
    "a{1000000000}",
    "a{10000}",
    "a{20000,}",
    "a{,20000}",
    "a{2,20000}",
    "(?:(?:a{100}){100}){100}",
    "(?:(?:a{100}){10}){11}",
    "(?:a{100}?){101}+",
    "(?:" * 20 + "a" + "{2})" * 20,
    "(?<=(?:a{101}){100})b",
    "(b)(?(1)a{101}|c){100}",
    "[]a]{10001}",
    "[[:alpha:]]{10001}",
    "[\\]]{10001}",
    "a(?#a comment){10001}",
    "\\p{L}{10001}",
    "\\N{DIGIT ONE}{10001}",
    "\\{{10001}",
    "\\\\a{10001}",
    "[a-z]{10000}[0-9]{9000}",
    "\\X{2000}",
    "\\R{2000}",
]
FLAGS = ["(?if)a", "(?i:(?f:a))", "(?r)ab", "(?ir:ab)", "(?x) a { 1 0 0 0 1 }", "(?-x:a)", "(?V1)a", "\\\\(?x)a"]
CALLS = [
    "a(?R)?b",
    "(?R)",
    "(a(?1)?b)",
    "(?P<n>a(?P>n)?b)",
    "(?P<n>a(?P&n)?b)",
    "(?<n>a(?&n)?b)",
    "(a(?-1)?b)",
    "(?+1)(a)",
    "(?0)a",
    "(?(DEFINE)(?<n>a))(?&n)",
]
FUZZY = [
    "(?:abc){e}",
    "(?:abc){e<=1}",
    "a{i}",
    "a{d<=2}",
    "[a-z]{s<=1}",
    "(abc){1<=e<=3}",
    "(abc){i<=2,d<=2,e<=3}",
    "(abc){2i+2d+1s<=4}",
    "(abc){e<=1:[a-z]}",
    "(?b)(abc){e<=9}",
    "\\N{e<=1}",
]
STARTS = [r"\Gab", r"a\Kb", r"a\\\Kb"]
COMMON = [
    r"\n\n(User|Human):",
    r"END$",
    r"[0-9]{3}-[0-9]{4}",
    r"(?i)the end[.!?]",
    r"</?(tool|think)>",
    r"[a-f0-9]{8}(-[a-f0-9]{4}){3}-[a-f0-9]{12}",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}",
    r"\{e\}",
    r'\{"id": ?',
    '{"name',
    "a{,}b",
    "{}x",
    r"\p{Script=Greek}+",
    r"\(\?R\)",
    r"f\(?x\)?",
    "(?=Observation:)",
    r"(?<=\d)\s",
    r"(?P<fix>['\"]).*?(?P=fix)",
    "(a)(?(1)b|c)",
    "(?s-i:a.b)",
    r"a\\Gb",
    "(?i)GK",
    "a{5000}",
]


def message_of(pattern: str) -> str:
    with pytest.raises(ValueError, match="stop_regex") as caught:
        SamplingParams(stop_regex=pattern)
    assert repr(pattern)[:40] in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pattern", REPETITIONS)
def test_repetitions_are_bounded(pattern: str) -> None:
    assert f"(bytes times counted repetitions); at most {MAX_SIZE} is allowed" in message_of(pattern)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [(FLAGS, "sets one of the flags"), (CALLS, "calls a group"), (FUZZY, "matches fuzzily"), (STARTS, "moves")],
)
def test_features_that_are_not_supported_are_refused(listed: list[str], reason: str) -> None:
    for pattern in listed:
        assert reason in message_of(pattern)


def test_refused_patterns_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(patterns.regex, "compile", compiled.append)
    for pattern in REPETITIONS + FLAGS + CALLS + FUZZY + STARTS:
        message_of(pattern)
    assert compiled == []


@pytest.mark.parametrize("pattern", [r"\L<words>", "(" * 120, "[a", "{id}", r"\p{nonsense}", "(?P<1>a)"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    assert "is not a valid pattern" in message_of(pattern)


@pytest.mark.parametrize("pattern", ["", "x*", "$", "a|", "(?:|a?){20}"])
def test_a_pattern_that_matches_the_empty_text_is_refused(pattern: str) -> None:
    assert "matches the empty text" in message_of(pattern)


def test_a_pattern_that_is_slow_on_the_empty_text_is_refused() -> None:
    assert "takes too long on the empty text" in message_of(r"(?:^|$|\A)" * 23 + "(?!)")


def test_an_error_inside_the_regex_package_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(patterns.regex, "compile", fail)
    assert "is not a valid pattern: list index out of range" in message_of("never seen before")


@pytest.mark.parametrize("pattern", COMMON)
def test_common_patterns_are_accepted(pattern: str) -> None:
    assert SamplingParams(stop_regex=pattern).stop_regex == pattern
    assert compile_pattern(pattern).pattern == regex.compile(pattern).pattern


TOKENS = [
    "a", "ß", "ss", " ", "#", "\n", "{", "}", "{30}", "{99}", "{,9}", "{5,}", "{1 0 0}", "*", "+", "?", "|", "(", ")",
    "(?:", "(?=", "(?<!", "(?>", "(?|", "(?i)", "(?if)", "(?x)", "(?-x)", "(?x:", "(?V1)", "(?#", "(?P<n>", "(?(1)",
    "(?(?=", "(?(DEFINE)", "(*FAIL)", "[", "]", "[^", "[]", "[[:alpha:]]", "[[:", "--", "-", ":", "\\", "\\p{L}",
    "\\p{", "\\N{DIGIT ONE}", "\\N{", "\\X", "\\R", "\\w", "\\b", "\\K", "\\G", "\\1", "\\L<x>", "{e}", "{e<=1}", "<=",
    "e", ",", "(?R)", "(?1)", "(?&n)", "(?P >n)", "(?r)", "(?p)", "(?w)", "99", ".",
]  # fmt: skip


@given(st.lists(st.sampled_from(TOKENS), max_size=40), st.booleans())
def test_random_patterns_are_refused_or_small(tokens: list[str], closes: bool) -> None:
    pattern = "".join(tokens)
    if closes:
        pattern += ")" * max(0, pattern.count("(") - pattern.count(")"))
    pattern = pattern.encode()[:MAX_PATTERN_BYTES].decode(errors="ignore")
    try:
        compiled = compile_pattern(pattern)
    except ValueError:
        return
    assert sys.getsizeof(compiled) < MAX_COMPILED_BYTES


@pytest.mark.parametrize("part", ["a?", "a*", "(a)", r"\R", r"\X", "(?:a|b)", "[ab]", "(?=a)", "(?i:[a-z])"])
def test_the_largest_patterns_are_small(part: str) -> None:
    body = part * (200 // len(part))
    sizes = [count for count in range(1, 500) if is_accepted(f"x(?:{body}){{{count}}}")]
    assert sys.getsizeof(compile_pattern(f"x(?:{body}){{{sizes[-1]}}}")) < MAX_COMPILED_BYTES


def is_accepted(pattern: str) -> bool:
    try:
        return expanded_size(pattern) > 0
    except ValueError:
        return False


def test_patterns_of_a_request_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"{letter}{{1000}}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    size = sum(map(expanded_size, many))
    assert size > MAX_SIZE
    check_patterns(many[:7])
    monkeypatch.setattr(patterns.regex, "compile", pytest.fail)  # they are not compiled
    with pytest.raises(ValueError, match=rf"the 26 patterns of one request have a size of {size} together"):
        SamplingParams(stop_regex=many)


def test_checking_many_patterns_leaks_no_memory() -> None:
    notes: dict[object, object] = vars(sys.modules[regex.compile.__module__])["_locale_sensitive"]
    for index in range(3000):
        compile_pattern(f"never seen {index}")
    assert len(notes) <= 1000


def test_the_cache_drops_the_patterns_that_were_used_least_recently() -> None:
    cache = PatternCache(max_bytes=3 * 17_000)
    first = cache.get("a")
    second = cache.get("b")
    assert cache.get("a") is first
    for pattern in "cd":
        cache.get(pattern)
    assert cache.num_bytes <= 3 * 17_000 + 17_000
    assert cache.get("b") is not second
