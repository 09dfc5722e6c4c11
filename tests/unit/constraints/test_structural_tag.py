"""Structural tags, compared with a simple reference that finds the possible ends of each format in a text."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine import SamplingParams
from aioengine.errors import UnsupportedSchemaError
from tests.kit import special_tokens
from tests.kit.grammar_walks import demo_grammars, grammar_of, text_of, token_bytes, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioengine.constraints.grammars import Constraint
    from aioengine.protocol.messages import Grammar

Format = dict[str, Any]

# ---------------------------------------------------------------- the reference


def ends(given: Format, text: str, start: int, behind: list[str]) -> set[int]:
    """Return the possible ends of a format that starts at ``start``. behind: the literals that may follow, if known."""
    kind = given["type"]
    if kind == "const_string":
        return literal([given["value"]], text, start)
    if kind == "json_schema":
        return literal(
            [json.dumps(value, separators=(",", ":")) for value in given["json_schema"]["enum"]], text, start
        )
    if kind == "regex":
        pattern = re.compile(given["pattern"])
        return {end for end in range(start, len(text) + 1) if pattern.fullmatch(text, start, end)}
    if kind == "any_text":
        ends_of_text = free(text, start, given.get("excludes", ()), behind)
        return {end for end in ends_of_text if end - start <= given.get("max_chars", len(text))}
    if kind == "sequence":
        return sequence(given["elements"], text, start, behind)
    if kind == "or":
        return {end for element in given["elements"] for end in ends(element, text, start, behind)}
    if kind == "optional":
        return {start} | ends(given["content"], text, start, behind)
    if kind in ("star", "plus", "repeat"):
        least, most = {"star": (0, -1), "plus": (1, -1)}.get(kind) or (given["min"], given["max"])
        return repeated(lambda at: ends(given["content"], text, at, []), text, start, least, most)
    if kind == "tag":
        return sequence(parts_of(given), text, start, behind)
    if kind == "tags_with_separator":
        return separated(given, text, start)
    return dispatched(given, text, start, behind)


def literal(texts: Iterable[str], text: str, start: int) -> set[int]:
    return {start + len(option) for option in texts if text.startswith(option, start)}


def free(text: str, start: int, excludes: Iterable[str], behind: Iterable[str]) -> set[int]:
    """Free text ends before the first literal of ``behind``; without literals, anywhere."""
    if behind:
        return {end for end, _ in firsts(text, start, excludes, behind)}
    return {end for end in range(start, len(text) + 1) if not any(exclude in text[start:end] for exclude in excludes)}


def firsts(text: str, start: int, excludes: Iterable[str], behind: Iterable[str]) -> set[tuple[int, str]]:
    """Return the start and the text of the first literal of ``behind``; several if they end at the same position."""
    matches = {(at, option) for option in behind for at in range(start, len(text) + 1) if text.startswith(option, at)}
    first = min((at + len(option) for at, option in matches), default=0)
    return {
        (at, option)
        for at, option in matches
        if at + len(option) == first and not any(excluded in text[start:at] for excluded in excludes)
    }


def sequence(elements: list[Format], text: str, start: int, behind: list[str]) -> set[int]:
    nexts = [*(first_literals(element) for element in elements[1:]), behind]
    positions = {start}
    for element, literals in zip(elements, nexts, strict=True):
        positions = {end for at in positions for end in ends(element, text, at, literals)}
    return positions


def first_literals(given: Format) -> list[str]:
    if given["type"] == "const_string":
        return [given["value"]]
    if given["type"] == "tag":
        return [given["begin"]]
    if given["type"] == "or" and all(element["type"] == "const_string" for element in given["elements"]):
        return [element["value"] for element in given["elements"]]
    return []


def parts_of(tag: Format, begin: str | None = None) -> list[Format]:
    """Return the parts of a tag as a sequence. begin: replaces its own."""
    end = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
    last = {"type": "or", "elements": [{"type": "const_string", "value": option} for option in end]}
    return [{"type": "const_string", "value": tag["begin"] if begin is None else begin}, tag["content"], last]


def repeated(once: Callable[[int], set[int]], text: str, start: int, least: int, most: int) -> set[int]:
    all_reached, reached = set[int](), {start}
    for count in range(least + len(text) + 1 if most < 0 else most + 1):
        if count >= least:
            all_reached |= reached
        reached = {end for at in reached for end in once(at)}
    return all_reached


def separated(given: Format, text: str, start: int) -> set[int]:
    def one(at: int) -> set[int]:
        return {end for tag in given["tags"] for end in ends(tag, text, at, [])}

    def another(at: int) -> set[int]:
        return {end for after in literal([given["separator"]], text, at) for end in one(after)}

    most = 0 if given.get("stop_after_first") else -1
    results = {end for at in one(start) for end in repeated(another, text, at, 0, most)}
    return results if given.get("at_least_one") else results | {start}


def dispatched(given: Format, text: str, start: int, behind: list[str]) -> set[int]:
    if given["type"] == "dispatch":
        rules = [(begin, [content]) for begin, content in given["rules"]]
        loops = given.get("loop", True)
    else:
        trigger = next(iter(given["triggers"]))
        rules = [(trigger, parts_of(tag, tag["begin"].removeprefix(trigger))) for tag in given["tags"]]
        loops = not given.get("stop_after_first")
    excludes, results, todo, seen = given.get("excludes", ()), set[int](), [start], set[int]()
    if given.get("at_least_one"):
        todo = [end for tag in given["tags"] for end in ends(tag, text, start, [])]
        if not loops:
            return set(todo)
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        triggers = [begin for begin, _ in rules]
        stops = firsts(text, at, excludes, [*behind, *triggers])
        if behind:
            results |= {end for end, which in stops if which in behind}
        else:
            results |= free(text, at, [*excludes, *triggers], ())
        after = {
            end
            for begin, parts in rules
            for stop, which in stops
            if which == begin
            for end in sequence(parts, text, stop + len(begin), [])
        }
        if loops:
            todo += after
        else:
            results |= after
    return results


# ---------------------------------------------------------------- formats

JSON = st.sampled_from([["x"], [True, None], [5, {"a": 1}], [{"a": [1]}, []]]).map(
    lambda values: {"type": "json_schema", "json_schema": {"enum": values}}
)
CONST = st.sampled_from(["a", "ab", "<", "<b>", "é"]).map(lambda value: {"type": "const_string", "value": value})
REGEX = st.sampled_from(["[ab]+", "a?b{2}", "(ab)*", "[^<>]{1,3}"]).map(
    lambda pattern: {"type": "regex", "pattern": pattern}
)
TEXT = st.fixed_dictionaries(
    {"type": st.just("any_text")},
    optional={"excludes": st.sampled_from([["a"], ["ab", "<<"]]), "max_chars": st.integers(0, 3)},
)
FLAGS = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}


def nested(inner: st.SearchStrategy[Format]) -> st.SearchStrategy[Format]:
    tag = st.fixed_dictionaries(
        {
            "type": st.just("tag"),
            "begin": st.sampled_from(["<", "<a>", "<b"]),
            "content": inner,
            "end": st.sampled_from([">", "/>", [">", "!"]]),
        }
    )
    tags = st.lists(tag, min_size=1, max_size=2)
    few = st.lists(inner, min_size=1, max_size=3)
    kinds = {
        "sequence": {"elements": few},
        "or": {"elements": few},
        "optional": {"content": inner},
        "star": {"content": inner},
        "plus": {"content": inner},
        "repeat": {"content": inner, "min": st.integers(0, 2), "max": st.sampled_from([2, 3, -1])},
        "tags_with_separator": {"tags": tags, "separator": st.sampled_from([",", "", "ab"]), **FLAGS},
        "triggered_tags": {"tags": tags, "triggers": st.just(["<"]), **FLAGS},
        "dispatch": {
            "rules": st.lists(st.tuples(st.sampled_from(["<", "<a", "#"]), inner).map(list), min_size=1, max_size=2),
            "loop": st.booleans(),
        },
    }
    excludes = {"excludes": st.sampled_from([["a"], ["b<", "!"]])}
    free_text = ("triggered_tags", "dispatch")
    return tag | st.one_of(
        [
            st.fixed_dictionaries({"type": st.just(kind), **parts}, optional=excludes if kind in free_text else {})
            for kind, parts in kinds.items()
        ]
    )


FORMATS = st.recursive(CONST | REGEX | TEXT | JSON, nested, max_leaves=5)


MATCHES = {"[ab]+": ["a", "ba"], "a?b{2}": ["bb", "abb"], "(ab)*": ["", "abab"], "[^<>]{1,3}": ["a", "!b"]}


PIECES = [
    "a",
    "b",
    "ab",
    "bb",
    "<",
    "<a",
    "<a>",
    "<b",
    "<b>",
    ">",
    "/>",
    "!",
    ",",
    "#",
    "é",
    '"',
    "x",
    "}",
    "]",
    "rue",
    "ull",
    "1",
]


def drawn_text(given: Format, drawn: random.Random) -> str:
    """Return a text that matches the format, unless its free text has a forbidden part."""
    kind = given["type"]
    if kind == "const_string":
        return given["value"]
    if kind == "json_schema":
        return json.dumps(drawn.choice(given["json_schema"]["enum"]), separators=(",", ":"))
    if kind == "regex":
        return drawn.choice(MATCHES[given["pattern"]])
    if kind == "sequence":
        return "".join(drawn_text(element, drawn) for element in given["elements"])
    if kind == "or":
        return drawn_text(drawn.choice(given["elements"]), drawn)
    if kind == "tag":
        return "".join(drawn_text(element, drawn) for element in parts_of(given))
    some = range(drawn.randrange(3))
    if kind == "tags_with_separator":
        return given["separator"].join(drawn_text(drawn.choice(given["tags"]), drawn) for _ in some)
    if "content" in given:
        return "".join(drawn_text(given["content"], drawn) for _ in some)
    text = "".join(drawn.choice("ab>!,") for _ in some)
    for _ in some:
        if kind == "dispatch":
            begin, content = drawn.choice(given["rules"])
            text += begin + drawn_text(content, drawn)
        elif kind == "triggered_tags":
            text += drawn_text(drawn.choice(given["tags"]), drawn)
    return text + "".join(drawn.choice("ab>!,") for _ in some)


def is_valid(given: Format, text: str) -> bool:
    return len(text) in ends(given, text, 0, [])


def is_accepted(constraint: Constraint, text: str) -> bool:
    tried = constraint.matcher.deep_copy()
    ids = [single_bytes()[byte] for byte in text.encode()]
    return tried.try_consume_tokens(ids) == len(ids) and tried.is_accepting()


@cache
def single_bytes() -> dict[int, int]:
    return {data[0]: token_id for token_id, data in enumerate(token_bytes()) if len(data) == 1}


def can_be_completed(grammar: Grammar, ids: list[int], drawn: random.Random) -> bool:
    """Return whether random pieces of format texts, or other tokens if none fits, complete the output."""
    pieces = [[single_bytes()[byte] for byte in piece.encode()] for piece in PIECES]
    begun = demo_grammars().open(grammar, [], 0).matcher
    assert begun.consume_tokens(ids)
    for _ in range(200):
        matcher = begun.deep_copy()
        for _ in range(12):
            if matcher.is_accepting():
                return True
            fitting = [piece for piece in pieces if matcher.validate_tokens(piece) == len(piece)]
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            tokens = fitting or [[token_id] for token_id in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
            assert matcher.consume_tokens(list(map(int, drawn.choice(tokens))))
    return False


def test_outputs_are_valid_and_valid_texts_are_accepted() -> None:
    counts = Counter[str]()

    @settings(deadline=None, max_examples=250)
    @given(FORMATS, st.integers(0, 10_000))
    def check(given: Format, seed: int) -> None:
        try:
            grammar = grammar_of(structural_tag={"format": given}, whitespace="")
        except UnsupportedSchemaError:
            counts["refused"] += 1
            return
        drawn = random.Random(seed)
        ids, is_complete = walk(grammar, seed, max_tokens=40)
        counts["complete" if is_complete else "cut"] += 1
        assert is_valid(given, text_of(ids)) if is_complete else can_be_completed(grammar, ids, drawn)
        constraint = demo_grammars().open(grammar, [], 0)
        for _ in range(3):
            text = drawn_text(given, drawn)
            changed = text.replace(drawn.choice("ab<>!,"), drawn.choice("ab<>!,"), 1)
            assert is_valid(given, changed) or not is_accepted(constraint, changed)
            if is_valid(given, text):
                counts["accepted" if is_accepted(constraint, text) else "missed"] += 1

    check()
    assert counts["complete"] > 100, counts
    # A text is missed if two parts start alike, and the grammar takes the longer one.
    assert counts["accepted"] > 300 > 10 * counts["missed"], counts
    assert counts["refused"] < 100, counts


TEXT_TAG = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def row(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def word(text: str) -> Format:
    return {"type": "const_string", "value": text}


LINE = row({"type": "any_text"}, word("\n"))


@pytest.mark.parametrize(
    "given",
    [
        row({"type": "optional", "content": LINE}, TEXT_TAG),
        row({"type": "repeat", "min": 0, "max": 1, "content": LINE}, TEXT_TAG),
        row({"type": "star", "content": LINE}, word("END")),
        row(row({"type": "plus", "content": row({"type": "or", "elements": [LINE, LINE]})}), TEXT_TAG),
        {**TEXT_TAG, "content": {"type": "star", "content": LINE}},
        {"type": "or", "elements": [TEXT_TAG, LINE]},
    ],
)
def test_free_text_that_can_match_another_format_is_refused(given: Format) -> None:
    with pytest.raises(UnsupportedSchemaError, match="has free text as an alternative to another format"):
        SamplingParams(structural_tag={"format": given})


@pytest.mark.parametrize(
    ("given", "texts", "others"),
    [
        ({"type": "star", "content": LINE}, ["", "a\n", "a\nb\n"], ["a"]),
        ({"type": "optional", "content": LINE}, ["", "a\n"], ["a"]),
        ({"type": "or", "elements": [TEXT_TAG, {"type": "any_text"}]}, ["<t>a</t>", "a"], []),
        (row({"type": "star", "content": row(word("-"), LINE)}, TEXT_TAG), ["<t></t>", "-a\n<t>b</t>"], ["a<t></t>"]),
        (row({"type": "repeat", "min": 0, "max": 0, "content": word("x")}, word("y")), ["y"], ["xy"]),
    ],
)
def test_free_text_with_a_visible_end_is_allowed(given: Format, texts: list[str], others: list[str]) -> None:
    grammar = grammar_of(structural_tag={"format": given})
    constraint = demo_grammars().open(grammar, [], 0)
    assert all(is_accepted(constraint, text) for text in texts)
    assert not any(is_accepted(constraint, text) for text in others)


@pytest.mark.parametrize(
    ("given", "pointer", "match"),
    [
        ({"type": "qwen_xml_parameter"}, "/type", "'qwen_xml_parameter' .* is not known; allowed: const_string"),
        ({"type": "grammar", "grammar": "root ::= 'a'"}, "/type", "'grammar'"),
        ({"type": "any_text", "max_tokens": 3}, "/max_tokens", "is not enforced; leave it out"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "/style", "is not enforced"),
        ({"type": "triggered_tags", "trigers": ["<"]}, "/trigers", r"is not enforced \(did you mean 'triggers'\?\);"),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": "a*"}, {"type": "json_schema",
             "json_schema": {}}]},
            "/elements/0", "no visible end",
        ),
        (
            {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"type": "integer"}},
             {"type": "const_string", "value": "5"}]},
            "/elements/0/json_schema", "may be a number",
        ),
        ({"type": "star", "content": {"type": "any_text"}}, "", "no visible end"),
        (
            {**TEXT_TAG, "content": {"type": "triggered_tags", "triggers": ["</"], "tags": [{**TEXT_TAG, "begin":
             "</"}]}},
            "/content", "the trigger '</' that begins before its end '</t>'",
        ),
        ({"type": "repeat", "min": 0, "max": 2000, "content": {"type": "const_string", "value": "a"}}, "/max", "2,000"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_enforced_are_refused_by_name(given: Format, pointer: str, match: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=match) as raised:
        SamplingParams(structural_tag={"format": given})
    assert raised.value.pointer.startswith(f"/format{pointer}")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"type": "any_text", "excludes": [""]}, "/format/excludes must be a list of 1 to 32 strings that are not"),
        ({"type": "any_text", "max_chars": -2}, "/format/max_chars must be an integer"),
        ({"type": "repeat", "min": 3, "max": 2, "content": TEXT_TAG}, "/format/max must be -1 or from 'min'"),
        ({"type": "dispatch", "rules": [["a"]]}, "/format/rules/0 must be a list of a text and a format"),
        ({"type": "tags_with_separator", "tags": [TEXT_TAG]}, "/format/separator must be a string, got None"),
        ({**TEXT_TAG, "end": 5}, "/format/end must be a list"),
        ({"type": "const_string", "value": "\ud800"}, "/format/value must be a string"),
        (
            {"type": "triggered_tags", "triggers": ["<t"], "tags": [TEXT_TAG], "at_least_one": 1},
            "at_least_one must be true or false, got 1",
        ),
    ],
)
def test_invalid_structural_tag_is_refused_with_its_pointer(given: Format, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplingParams(structural_tag={"format": given})


def test_text_of_a_tag_may_be_as_large_as_its_dict() -> None:
    tag = json.dumps({"format": {"type": "const_string", "value": "yes"}})
    assert SamplingParams(structural_tag=tag + " " * (200_000 - len(tag))).structural_tag


def test_format_at_the_top_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"it has no \"format\": put it there, .*; it has 'tags', 'type'$"):
        SamplingParams(structural_tag={"type": "triggered_tags", "tags": [TEXT_TAG]})


def token(text: str) -> Format:
    return {"type": "token", "token": text}


ANY_TEXT = {"type": "any_text"}
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
MESSAGE = row(token("<|start|>"), ANY_TEXT, token("<|end|>"))


@pytest.mark.parametrize(
    ("given", "texts", "others"),
    [
        (row(ANY_TEXT, token("[ARGS]"), word("x")), ["[ARGS]x", "a[ARGS]x"], ["ax", "a[ARGS]", "[ARGS][ARGS]x"]),
        (row(NUMBER, token("[ARGS]"), NUMBER), ["12[ARGS]3"], ["123"]),
        (
            row(ANY_TEXT, {"type": "optional", "content": row(token("[ARGS]"), word("x"))}),
            ["", "a", "a[ARGS]x"], ["a[ARGS]"],
        ),
        (
            row({"type": "star", "content": MESSAGE}, token("<|call|>"), ANY_TEXT),
            ["<|call|>", "<|start|>a<|end|><|start|><|end|><|call|>b"], ["<|start|>a<|call|>b", "a<|call|>"],
        ),
        ({"type": "or", "elements": [row(token("[THINK]"), ANY_TEXT, token("[/THINK]"), ANY_TEXT), ANY_TEXT]},
         ["[THINK]a[/THINK]b", "a"], ["[THINK]a"]),
        (row(word("a"), token("no such token"), word("b")), ["ano such tokenb"], ["ab"]),
    ],
)  # fmt: skip
def test_special_tokens_end_free_text_and_are_no_part_of_it(given: Format, texts: list[str], others: list[str]) -> None:
    grammar = special_tokens.compiled(structural_tag={"format": given})
    assert all(special_tokens.accepts(grammar, text) for text in texts)
    assert not any(special_tokens.accepts(grammar, text) for text in others)


@pytest.mark.parametrize(
    "given",
    [
        row(ANY_TEXT, {"type": "optional", "content": token("[ARGS]")}, ANY_TEXT),
        row(ANY_TEXT, {"type": "star", "content": token("[ARGS]")}, word("x"), NUMBER),
        row(ANY_TEXT, {"type": "or", "elements": [token("[ARGS]"), NUMBER]}),
    ],
)
def test_free_text_before_an_optional_special_token_needs_another_end(given: Format) -> None:
    with pytest.raises(UnsupportedSchemaError, match="has no visible end"):
        SamplingParams(structural_tag={"format": given})


def test_text_that_looks_like_the_rule_of_a_special_token_stays_text() -> None:
    for text in ('r0: %token "[ARGS]"', '\nr0: %token "[ARGS]"\n'):
        plain = text.replace("[ARGS]", "[" + "ARGS]")
        grammar = special_tokens.compiled(structural_tag={"format": word(text)})
        ids = [special_tokens.ids_of_bytes()[byte] for byte in plain.encode()]
        matcher = special_tokens.grammars().open(grammar, [], 0).matcher
        assert matcher.try_consume_tokens(ids) == len(ids)
