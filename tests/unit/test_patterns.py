"""Stop patterns from outside: attacks are refused or cheap to compile, and what is common is taken."""

from __future__ import annotations

import contextlib
import sys
import time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from aioengine import patterns
from aioengine.checks import MAX_PATTERN_BYTES
from aioengine.params import SamplingParams
from aioengine.patterns import MAX_EXPANDED_SIZE, check_patterns, compile_pattern, expanded_size

GENEROUS_CPU_S = 0.05
"""Ten times what the costliest pattern takes; the bound itself is the number of parts."""

REPEATS = [
    "a{1000000000}",
    "a{10001}",
    "a{20000,}",
    "a{,20000}",
    "a{2,20000}",
    "(?:(?:a{100}){100}){100}",
    "(?:(?:a{100}){10}){11}",
    "(?:a{100}?){101}+",
    "(?:" * 20 + "a" + "{2})" * 20,
    "((a{2}){2}){2501}",
    "(?i:a{101}){100}",
    "(?|a{101}|b){100}",
    "(?>a{101}){100}b",
    "(?=(?:a{101}){100})b",
    "(?<=(?:a{101}){100})b",
    "(?(?=a{101})b|c){100}",
    "(b)(?(1)a{101}|c){100}",
    "(?P<n>a{101}){100}",
    "(?<n>a{101}){100}",
    "(a)(?P=n)?(?:\\1{101}){100}",
    "[]a]{10001}",
    "[^]a]{10001}",
    "[[:alpha:]]{10001}",
    "[\\]]{10001}",
    "a(?i){10001}",
    "a(?#a comment){10001}",
    "(?#\\))a{10001}",
    "\\p{L}{10001}",
    "\\N{DIGIT ONE}{10001}",
    "\\{{10001}",
    "(?x) a { 1 0 0 0 1 }",
    "(?x) a {1#{2}\n0001}",
    "(?x)(?:a{101} # )\n){100}",
    "(?x:a{101}){100}",
    "(?V1)[a[b]{2}]{10001}",
    "(?V1)(?:[a--b]{101}){100}",
    "a{4294967294}",
    "(?:a{3}b{3}){3400}",
]
SIZES = ["[a-z]{10000}[0-9]{9000}", "(?:[ab][cd]){5000}", "\\X{9000}", "\\R{2000}", "x{9000}y{9000}z{9000}"]
FOLDED = [
    r"(?if)[\w\d]{6000}x",
    r"(?if)A" + r"[\w\d]*" * 30,
    "(?if)" + "([[a]" * 40,
    r"(?i)(?f)[\w\d]{4}",
    r"(?i:(?f:[\w\d]{4}))",
    r"(?fi-s:[\w\d]{4})",
    r"(?x)(? i f ) [\w\d]{600}",
    "(?x)(? i#a comment\n f : [\\w\\d]{600})",
    r"(?V1i)[\w\d]{600}",
    r"(?V1)(?i:[\w\d]{600}x)",
    r"(?V1)(?i)[\w--[a-z]]{600}x",
    "(?if)ß{9999}",
    "(?if)\\xDF{9999}",
    "(?if)(?:ﬃ){9999}",
]
CALLS = [
    "a(?R)?b",
    "(?R)",
    "(a(?1)?b)",
    "(?1)(a)",
    "(?P<n>a(?P>n)?b)",
    "(?P<n>a(?P&n)?b)",
    "(?<n>a(?&n)?b)",
    "(a(?-1)?b)",
    "(?+1)(a)",
    "(?0)a",
    "(?(DEFINE)(?<n>a))(?&n)",
    "(?x)(a(? P > n))(?P >n)",
    "(?x)(?<n>a(?&n)?)",
]
FUZZY = [
    "(?:abc){e}",
    "(?:abc){e<=1}",
    "(?:abc){e<3}",
    "a{i}",
    "a{d<=2}",
    "[a-z]{s<=1}",
    "(abc){1<=e<=3}",
    "(abc){i<=2,d<=2,e<=3}",
    "(abc){2i+2d+1s<=4}",
    "(abc){e<=1:[a-z]}",
    "(?b)(abc){e<=9}",
    "(?x)(abc){ e <= 1 }",
    "(?x)(abc){#\ne#\n<=1}",
    "\\N{e<=1}",
]
PASSING = [
    "a{10000}",
    "(?:a{100}){100}",
    "[ab]{6000}",
    "(?if:ss|ß){1000}x",
    "(?if)ß{4900}",
    "(?if)\\xDF{4900}",
    "(?if)" + r"[\w\d]" * 3,
    r"(?uif)[[:alpha:]ß]{3}x",
    r"(?if)(?:[\w\d]|[\x00-\U0010ffff])[ßﬃſ]",
    r"(?V1i)[\w--[a-z]]",
    r"(?if)(?<=[\w\d]{3})x",
    r"(?i)[\w\d]{6000}x",
    r"(?f)[\w\d]{6000}x",
    r"(?V1)[\w\d]{6}x",
    "(?:a+?b+c*){1800}",
    "(?<!a)b?c" * 28,
    "a?" * 60 + "a" * 60,
    "(?:" * 50 + "a" + ")*" * 50 + "b",
    "(?=a" * 50 + ")" * 50 + "b",
    "(" * 80 + "a" + ")" * 80,
    "(?|" * 50 + "a" + ")" * 50,
    "(?>a?" * 40 + ")" * 40 + "b",
    "(?(?=a)" * 20 + "b" + "|c)" * 20,
    "(?if)" + "ﬃ" * 80,
    "(?i)" + "ß" * 120,
    "\\X" * 120,
    "\\p{L}" * 50,
    "[[:alpha:]]" * 20,
    "(?V1)" + "[a--" * 40 + "b" + "]" * 40,
    "a|" * 120 + "b",
    "(a)|" * 60 + "b",
    ".*" * 120 + "x",
    "(.*)" * 60 + "x",
    "(?:a??){4000}b",
]
COMMON = [
    r"\n\n(User|Human):",
    r"END$",
    r"[0-9]{3}-[0-9]{4}",
    r"(?i)the end[.!?]",
    r"</?(tool|think)>",
    r"[a-f0-9]{8}(-[a-f0-9]{4}){3}-[a-f0-9]{12}",
    r"\{e\}",
    r'\{"id": ?',
    '{"name',
    "a{,}b",
    "{}x",
    r"\p{s}x",
    r"\p{Script=Greek}+",
    r"[{e}]",
    r"[(?R)]x",
    r"\(\?R\)",
    "(?=Observation:)",
    r"(?<=\d)\s",
    r"(?x) a \ b  # a comment (with a bracket",
    "(?V1)[a-z--[aeiou]]{3}",
    r"(?P<q>['\"]).*?(?P=q)",
    "(a)(?(1)b|c)",
    "(?s-i:a.b)",
    "a(?#{e})b",
]


@pytest.mark.parametrize("pattern", FOLDED)
def test_sets_under_full_case_folding_are_bounded(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"stop_regex .*has \d+ parts .* leave full case folding"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", REPEATS + SIZES)
def test_repetitions_are_bounded(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"stop_regex .*(repeats a part \S+ times|has \d+ parts)"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", CALLS)
def test_calls_of_groups_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="calls a group"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", FUZZY)
def test_fuzzy_matching_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches fuzzily"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", [r"\L<words>", "(?V0)(?V1)a", "(" * 120, "[a", "{id}", r"\p{nonsense}", "(?P<1>a)"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a valid pattern"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", ["", "x*", "$", "a|", "(?:|a?){20}"])
def test_a_pattern_that_matches_the_empty_text_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches the empty text"):
        SamplingParams(stop_regex=pattern)


def test_a_pattern_that_is_slow_on_the_empty_text_is_refused() -> None:
    pattern = r"(?:^|$|\A)" * 23 + "(?!)"
    with pytest.raises(ValueError, match="takes too long on the empty text"):
        SamplingParams(stop_regex=pattern)


@pytest.mark.parametrize("pattern", COMMON)
def test_common_patterns_pass(pattern: str) -> None:
    assert SamplingParams(stop_regex=pattern).stop_regex == pattern
    assert compile_pattern(pattern)[0].pattern == regex.compile(pattern).pattern


def cpu_s(pattern: str) -> float:
    """The least of three, since a garbage collection may come between."""
    found: list[float] = []
    for _ in range(3):
        started = time.thread_time()
        with contextlib.suppress(ValueError):
            compile_pattern(pattern)
        found.append(time.thread_time() - started)
    return min(found)


@pytest.mark.parametrize("pattern", PASSING + COMMON)
def test_accepted_patterns_compile_in_little_time(pattern: str) -> None:
    assert len(pattern.encode()) <= MAX_PATTERN_BYTES
    assert compile_pattern(pattern)[1] <= MAX_EXPANDED_SIZE
    assert cpu_s(pattern) < GENEROUS_CPU_S


@pytest.mark.parametrize("pattern", REPEATS + SIZES + CALLS + FUZZY)
def test_what_is_refused_is_not_compiled(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(patterns, "_compile", compiled.append)
    with pytest.raises(ValueError, match="stop_regex"):
        compile_pattern(pattern)
    assert compiled == []
    assert cpu_s(pattern) < GENEROUS_CPU_S


TOKENS = [
    "a", "ß", "ss", " ", "#", "\n", "{", "}", "{30}", "{99}", "{,9}", "{5,}", "{1 0 0}", "*", "+", "?", "|", "(", ")",
    "(?:", "(?=", "(?<!", "(?>", "(?|", "(?i)", "(?if)", "(?x)", "(?-x)", "(?x:", "(?V1)", "(?#", "(?P<n>", "(?(1)",
    "(?(?=", "(?(DEFINE)", "(*FAIL)", "[", "]", "[^", "[]", "[[:alpha:]]", "[[:", "--", "-", ":", "\\", "\\p{L}",
    "\\p{", "\\N{DIGIT ONE}", "\\N{", "\\X", "\\R", "\\w", "\\b", "\\K", "\\G", "\\1", "\\L<x>", "{e}", "{e<=1}", "<=",
    "e", ",", "(?R)", "(?1)", "(?&n)", "(?P >n)", "(?r)", "(?p)", "(?w)", "99", ".",
]  # fmt: skip


@given(st.lists(st.sampled_from(TOKENS), max_size=40), st.booleans())
def test_random_patterns_are_refused_or_cheap_to_compile(tokens: list[str], closes: bool) -> None:
    pattern = "".join(tokens)
    if closes:
        pattern += ")" * max(0, pattern.count("(") - pattern.count(")"))
    pattern = pattern[:MAX_PATTERN_BYTES].encode()[:MAX_PATTERN_BYTES].decode(errors="ignore")
    assert cpu_s(pattern) < GENEROUS_CPU_S


def test_patterns_are_bounded_together() -> None:
    many = [f"{letter}{{1000}}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    size = sum(map(expanded_size, many))
    assert size > MAX_EXPANDED_SIZE
    check_patterns(many[:10])
    with pytest.raises(ValueError, match=rf"the 26 patterns of stop_regex have {size} parts"):
        SamplingParams(stop_regex=many)


def test_checking_many_patterns_leaks_no_memory() -> None:
    notes: dict[object, object] = vars(sys.modules[regex.compile.__module__])["_locale_sensitive"]
    for index in range(3000):
        compile_pattern(f"never seen {index}")
    assert len(notes) <= 1000


def test_an_error_inside_the_pattern_compiler_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="cannot be compiled by the regex package, which raises IndexError"):
        compile_pattern(r"(?ifr)\Xİß")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?r)ab", "searches backwards"),
        ("(?ir:ab)", "searches backwards"),
        ("(?V1)(?r)ab", "searches backwards"),
        ("(?x)(? r)ab", "searches backwards"),
        (r"\Gab", r"has \\G, which"),
        (r"a\Kb", r"has \\K, which"),
        (r"a\\\Kb", r"has \\K, which"),
        (r"(?V1)(?x) a \G b", r"has \\G, which"),
    ],
)
def test_patterns_that_cannot_be_searched_for_piece_by_piece_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams(stop_regex=pattern)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("pattern", [r"a\\Gb", r"a\\\\Kb", "(?i)GK", "(?<=a)b"])
def test_patterns_that_only_look_like_these_are_accepted(pattern: str) -> None:
    assert SamplingParams(stop_regex=pattern).stop_regex == pattern
