"""Stops compared with a naive reference: returned text, text that is held back, and the stop that ends the text."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.constraints.patterns import PatternCache
from aioengine.errors import RequestError
from aioengine.text.stop import PUSH_BUDGET_S, REGEX_WINDOW, StopMatcher
from tests.kit.pieces import cut_up

few_letters = st.text(alphabet="abA🙂", max_size=12)
stop_strings = st.lists(st.text(alphabet="abA🙂", max_size=4), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return the end of the first complete stop, and the stop. If several end there, take the longest."""
    for end in range(1, len(text) + 1):
        results = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if results:
            return end, max(results, key=len)
    return None


def held_back(text: str, stops: list[str]) -> int:
    """Return the length of the longest end of ``text`` that is the beginning of a stop string."""
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max((size for size in range(1, len(text) + 1) if text[-size:] in beginnings), default=0)


@given(text=few_letters, stops=stop_strings, cuts=st.lists(st.integers(0, 12), max_size=6), keeps=st.booleans())
def test_stop_strings_match_as_in_a_plain_search(text: str, stops: list[str], cuts: list[int], keeps: bool) -> None:
    matcher = StopMatcher(stops, no_stop_trim=keeps)
    pushed = out = ""
    for piece in cut_up(text, cuts):
        pushed += piece
        out += matcher.push(piece)
        stop = first_stop(pushed, stops)
        if stop is None:
            assert matcher.matched is None
            assert out == pushed[: len(pushed) - held_back(pushed, stops)]
        else:
            end, matched = stop
            assert matcher.matched == matched
            assert out == pushed[: end if keeps else end - len(matched)]
    out += matcher.flush()
    if matcher.matched is None:
        assert out == text
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "texts", "matched"),
    [
        (["</think>"], ["a</th", "ink", ">b"], ["a", "", ""], "</think>"),
        (["</think>"], ["a</th", "inx"], ["a", "</thinx"], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["abc", "b"], ["abc"], ["a"], "b"),  # complete first
        (["bc", "abc", "c"], ["xabc"], ["x"], "abc"),  # they end together: the longer stop
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["abcd", "bce"], ["abc", "e"], ["", "a"], "bce"),  # the other stop continues
        (["]^-\\[&&||"], ["x]^-", "\\[&&||"], ["x", ""], "]^-\\[&&||"),
        (["", "x"], ["axb"], ["a"], "x"),
    ],
)
def test_stop_strings_match_in_example_texts(
    stops: list[str], pieces: list[str], texts: list[str], matched: str | None
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == texts
    assert matcher.matched == matched


def test_without_stops_text_is_returned_at_once() -> None:
    for matcher in (StopMatcher(), StopMatcher([""])):
        assert (matcher.push("text"), matcher.matched, matcher.flush()) == ("text", None, "")


def test_text_after_a_match_is_dropped() -> None:
    for keeps, text in [(False, "a"), (True, "ab")]:
        matcher = StopMatcher(["b"], no_stop_trim=keeps)
        assert matcher.push("abc") == text
        assert (matcher.push("d"), matcher.flush(), matcher.matched) == ("", "", "b")


LONG_STOPS = tuple(chr(97 + index % 26) + chr(65 + index) * 4000 + "!" for index in range(32))


def test_long_stop_strings_take_no_memory_and_no_time_to_prepare() -> None:
    tracemalloc.start()
    try:
        started = time.thread_time()
        matchers = [StopMatcher([*LONG_STOPS, str(index)]) for index in range(30)]
        used_s = time.thread_time() - started
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(matchers) == 30
    assert num_bytes < 1_000_000
    assert used_s < 2  # an automaton for one of them would already take as much


@given(text=st.text(alphabet="ab", max_size=60), stops=st.lists(st.text(alphabet="ab", min_size=8, max_size=12)))
def test_stop_strings_with_repetitions_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(char) for char in text)
    stop = first_stop(text, stops)
    if stop is None:
        assert out == text[: len(text) - held_back(text, stops)]
    else:
        assert (out, matcher.matched) == (text[: stop[0] - len(stop[1])], stop[1])


def test_long_stop_string_that_fails_at_its_last_character_takes_linear_time() -> None:
    """Its other possible starts are checked once, not again for each piece."""
    matcher = StopMatcher(["a" * 4000 + "b" + "a" * 90, "a" * 4090 + "b"])
    started = time.thread_time()
    out = "".join(matcher.push("aaaa") for _ in range(3000)) + matcher.push("c")
    assert out == "a" * 12_000 + "c"
    assert time.thread_time() - started < 2


def test_a_long_piece_is_read_in_linear_time() -> None:
    started = time.thread_time()
    assert StopMatcher(["ab" * 4, "ac"]).push("ab " * 300_000 + "a") == "ab " * 300_000
    assert time.thread_time() - started < 5


# ---------------------------------------------------------------- patterns


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None, str]:
    return [matcher.push(piece) for piece in pieces], matcher.matched, matcher.flush()


@pytest.mark.parametrize(
    ("patterns", "pieces", "texts", "matched", "rest"),
    [
        (["[0-9]+"], ["a", "b1", "2"], ["a", "b", ""], "[0-9]+", ""),
        (["\n(User|System):"], ["x\nUs", "er:", "y"], ["x", "", ""], "\n(User|System):", ""),
        (["\n(User|System):"], ["x\nUs", "ual", " y"], ["x", "\nUsual", " y"], None, ""),
        (["END$"], ["a EN", "D"], ["a ", ""], "END$", ""),
        (["END"], ["a EN"], ["a "], None, "EN"),
        (["(?<=x)ab"], ["x", "a", "b"], ["x", "", ""], "(?<=x)ab", ""),
        (["(?=Observation:)"], ["a Obs", "ervation: b"], ["a ", ""], "(?=Observation:)", ""),
        (["b", "a.?b"], ["ab"], [""], "a.?b", ""),
        (["^b"], ["a", "b"], ["a", "b"], None, ""),
    ],
)
def test_patterns_match_in_example_texts(
    patterns: list[str], pieces: list[str], texts: list[str], matched: str | None, rest: str
) -> None:
    assert run(StopMatcher([], patterns), pieces) == (texts, matched, rest)


def test_no_stop_trim_keeps_the_match_of_a_pattern() -> None:
    assert run(StopMatcher([], ["[0-9]+"], no_stop_trim=True), ["a", "b12c"]) == (["a", "b12"], "[0-9]+", "")


def test_strings_and_patterns_can_be_combined() -> None:
    assert run(StopMatcher(["xyz"], ["x[0-9]"]), ["ax", "1"]) == (["a", ""], "x[0-9]", "")
    assert run(StopMatcher(["xyz"], ["x[0-9]"]), ["ax", "yz"]) == (["a", ""], "xyz", "")
    assert run(StopMatcher(["b"], ["abc"]), ["abc"]) == (["a"], "b", "")  # complete first
    assert run(StopMatcher(["bc"], ["abc"]), ["abc"]) == ([""], "abc", "")  # starts first


@given(text=few_letters, stop=st.text(alphabet="abA🙂", min_size=1, max_size=4))
def test_a_pattern_without_operators_is_a_stop_string(text: str, stop: str) -> None:
    strings, patterns = StopMatcher([stop]), StopMatcher([], [stop])
    for char in text:
        assert strings.push(char) == patterns.push(char)
        assert strings.matched == patterns.matched
    assert strings.flush() == patterns.flush()


def test_a_pattern_holds_back_at_most_its_window() -> None:
    matcher = StopMatcher([], [r"[\s\S]+END"])
    out = matcher.push("a" * (2 * REGEX_WINDOW))
    assert len(out) == REGEX_WINDOW
    assert len(matcher.push("END")) == 0
    assert matcher.matched == r"[\s\S]+END"
    endless = StopMatcher([], [r"[\s\S]+END"])
    text = "".join(endless.push("abc") for _ in range(1000))
    assert text + endless.flush() == "abc" * 1000


def test_a_pattern_that_takes_too_long_for_one_piece_fails_by_name() -> None:
    matcher = StopMatcher([], ["(a|aa)+[bc]"], clock=time.thread_time)
    with pytest.raises(RequestError, match=r"longer than 0\.02 s for one token, with '\(a\|aa\)\+\[bc\]' on 40 char"):
        matcher.push("a" * 39 + "d")


def test_all_patterns_of_a_request_share_the_time_of_a_piece() -> None:
    patterns = [f"(a|aa)+[{letter}]" for letter in "abcdefghijklmnopqrstuvwxyzABCDEF"]
    matcher = StopMatcher([], patterns, clock=time.thread_time)
    started = time.thread_time()
    with pytest.raises(RequestError, match="for one token"):
        matcher.push("a" * 39 + "-")
    assert time.thread_time() - started < len(patterns) / 2 * PUSH_BUDGET_S


def test_total_time_of_slow_pieces_is_limited() -> None:
    now = itertools.count()
    matcher = StopMatcher(
        [], ["[a-z]+!"], clock=lambda: next(now) * PUSH_BUDGET_S / 4
    )  # the clock is read twice per piece
    message = r"longer than 0\.1\d\d s for \d+ tokens, with '\[a-z\]\+!'"
    with pytest.raises(RequestError, match=message):
        deque((matcher.push("a") for _ in range(1000)), maxlen=0)


def test_each_pattern_is_searched_from_its_own_position() -> None:
    matcher = StopMatcher([], [r"[\s\S]+END", "a+b"])
    assert [matcher.push(piece) for piece in ("xa", "aa", "ca", "a", "b")] == ["", "", "", "", "xaaaca"[:5]]
    assert matcher.matched == "a+b"


def test_compiled_patterns_are_shared_and_bounded_in_bytes() -> None:
    cache = PatternCache(max_bytes=1 << 20)
    matchers = [StopMatcher([], [f"x{index}{{3000}}", f"y{index}"], cache=cache) for index in range(300)]
    assert cache.num_bytes < 3 << 20
    assert [matcher.push(f"y{index}") for index, matcher in enumerate(matchers)] == [""] * 300
    assert [matcher.matched for matcher in matchers] == [f"y{index}" for index in range(300)]


def test_invalid_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_regex '\(' is not a valid pattern"):
        StopMatcher([], ["("])
