"""Random outputs of random schemas. All complete outputs are valid."""

from __future__ import annotations

import datetime
import json
import random
from collections import Counter
from concurrent.futures import wait
from functools import partial
from threading import Event
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.constraints.grammars import Constraint, Grammars, Turns
from aioengine.protocol.messages import Grammar
from tests.kit.grammar_walks import (
    FOLDER,
    VOCAB_SIZE,
    accepts,
    allowed,
    demo_grammars,
    grammar_of,
    text_of,
    token_bytes,
    walk,
)

Schema = dict[str, Any]

NAMES = st.sampled_from(["a", "b", "id", "x y", "é"])
PATTERNS = [r"^[a-c]+$", r"\d", r"^x.*y$", r"^(foo|ba+r)$", r"^\w{2,4}\s?$", r"[^\w]", r"^[^a-z]{1,3}$", r"(?i)^ab"]
LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 4),
            "maxLength": st.integers(3, 12),
            "pattern": st.sampled_from(PATTERNS),
        },
    ),
    st.fixed_dictionaries(
        {
            "format": st.sampled_from(["date", "date-time", "time", "uuid", "ipv4", "hostname"]),
            "type": st.just("string"),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["number", "integer", ["integer", "null"]])},
        optional={
            "minimum": st.sampled_from([-5, 0, 0.5, -0.1]),
            "maximum": st.sampled_from([100, 7.25, 1e6]),
            "exclusiveMinimum": st.sampled_from([0, -1, 0.25, 3]),
            "exclusiveMaximum": st.sampled_from([1000, 50.5, 10]),
        },
    ),
    st.just({"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 90}),
    st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["a", "bb", 1, 2.5, None, [1], {"a": 1}, 'é\n"']), min_size=1, max_size=4)}
    ),
    st.fixed_dictionaries({"const": st.sampled_from(["a", 1, None, [1, {"b": 2}]])}),
    st.sampled_from([{"type": "boolean"}, {"type": ["string", "null"], "maxLength": 2}, {}, True]),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
            optional={
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": st.one_of(st.just(False), inner),
                "maxProperties": st.integers(2, 3),
            },
        ),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "patternProperties": st.dictionaries(st.sampled_from(["^k", "^z[0-9]$"]), inner, min_size=1),
                "additionalProperties": st.just(False),
            }
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "prefixItems": few, "minItems": st.integers(0, 2), "maxItems": st.just(3)},
        ),
        st.fixed_dictionaries({"anyOf": few}, optional={"minimum": st.just(3), "maxLength": st.just(4)}),
        st.fixed_dictionaries({"oneOf": few}),
        st.fixed_dictionaries({"allOf": few}, optional={"required": st.just(["a"])}),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=6)


def test_every_complete_output_is_valid() -> None:
    counts = Counter[str]()

    @settings(deadline=None, max_examples=120)
    @given(SCHEMAS, SCHEMAS, st.integers(0, 10_000))
    def check(schema: Any, referred: Any, seed: int) -> None:
        whole = {"anyOf": [schema, {"$ref": "#/$defs/other", "maxLength": 5}], "$defs": {"other": referred}}
        try:
            grammar = grammar_of(json_schema=whole)
            demo_grammars().compile(grammar).result()
        except ValueError:  # the compiler may detect that no value is valid
            counts["refused"] += 1
            return
        for start in range(2):
            ids, is_complete = walk(grammar, seed + start, max_tokens=100)
            counts["complete" if is_complete else "cut"] += 1
            if is_complete:
                jsonschema.validate(json.loads(text_of(ids)), whole)

    check()
    assert counts["complete"] > 100, counts  # of 240 walks


@pytest.mark.parametrize(
    "limits",
    [
        {"minProperties": 1},
        {"maxProperties": 1},
        {"minProperties": 2, "required": ["b"]},
        {"minProperties": 2, "maxProperties": 2, "required": ["b"]},
        {"maxProperties": 3},
        {"minProperties": 1, "maxProperties": 5},
    ],
)
def test_optional_properties_are_counted(limits: Schema) -> None:
    schema = {"properties": {name: {"enum": [1]} for name in "abc"}, "additionalProperties": False, **limits}
    grammar = grammar_of(json_schema={"type": "object", **schema})
    for names in ("", "a", "b", "ab", "bc", "abc"):
        value = dict.fromkeys(names, 1)
        assert accepts(grammar, json.dumps(value)) == jsonschema.Draft202012Validator(schema).is_valid(value)


def spellings(name: str) -> set[str]:
    """Return spellings of a string in JSON, with and without escapes."""
    units = name.encode("utf-16-be").hex()
    codes = [units[place : place + 4] for place in range(0, len(units), 4)]
    return {
        json.dumps(name),
        json.dumps(name, ensure_ascii=False),
        json.dumps(name).replace("/", r"\/"),
        '"' + "".join(rf"\u{code}" for code in codes) + '"',
        '"' + "".join(rf"\u{code.upper()}" for code in codes) + '"',
    }


@pytest.mark.parametrize("name", ["a", "id", "/", "é", "😀", "\n", '"', "\\", "\x1f", "\x7f"])
@pytest.mark.parametrize("in_lark", [False, True])
def test_escaped_name_of_a_listed_property_is_not_another_property(name: str, in_lark: bool) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = grammar_of(ebnf=f"start: %json {json.dumps(schema)}") if in_lark else grammar_of(json_schema=schema)
    for spelt in spellings(name):
        assert not accepts(grammar, f'{{{spelt}:"x"}}')
        assert not accepts(grammar, f'{{{spelt}:1,{spelt}:"x"}}')
    assert any(accepts(grammar, f"{{{spelt}:1}}") for spelt in spellings(name))
    assert accepts(grammar, '{"b":"x","b":"y"}')


@pytest.mark.parametrize("value", [2**53, -(2**53), -0.0, 1.0, 1e15, 123456.789012345, -2.5, 1e-7, 1e-22])
@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": ["integer", "number", "null"]}])
def test_constant_numbers_are_written_as_they_are(value: float, schema: Schema) -> None:
    ids, is_complete = walk(grammar_of(json_schema={**schema, "enum": [value]}), 0)
    assert is_complete
    assert json.loads(text_of(ids)) == value


YEARS = ("2023", "2024", "1900", "2000", "0004")
DAYS = [f"{year}-{month}-{day}" for year in YEARS for month in ("00", "01", "02", "04", "12", "13")
        for day in ("00", "28", "29", "30", "31", "32")]  # fmt: skip


def test_dates_are_days_of_the_calendar() -> None:
    date, moment, bounded = (
        grammar_of(json_schema={"type": "string", **date})
        for date in (
            {"format": "date"},
            {"format": "date-time", "allOf": [{"maxLength": 30}]},
            {"format": "date", "pattern": "^2", "allOf": [{"pattern": "9$"}]},
        )
    )
    for day in DAYS:
        try:
            is_day = bool(datetime.date.fromisoformat(day))
        except ValueError:
            is_day = False
        assert accepts(date, f'"{day}"') == is_day
        assert accepts(moment, f'"{day}T00:00:00.5Z"') == is_day
        assert accepts(bounded, f'"{day}"') == (is_day and day[0] == "2" and day[-1] == "9")
    assert not accepts(date, '"0000-01-01"')


@pytest.mark.parametrize("text", ["23:59:59Z", "00:00:00.123456789-23:59", "12:30:00+01:00"])
def test_times_have_an_offset_and_no_leap_seconds(text: str) -> None:
    grammar = grammar_of(json_schema={"type": "string", "format": "time"})
    assert accepts(grammar, f'"{text}"')
    for wrong in (text.replace(":", ":60", 1)[:8] + "Z", text[:8], text[:6] + "60Z", "24" + text[2:], text + "0"):
        assert not accepts(grammar, f'"{wrong}"')


def test_hostnames_have_at_most_253_characters() -> None:
    grammar = grammar_of(json_schema={"type": "string", "format": "hostname"})
    longest = ".".join(("a" * 63, "b" * 63, "c" * 63, "d" * 61))
    assert len(longest) == 253
    assert all(accepts(grammar, f'"{text}"') for text in ("a-b.c", longest[1:], longest))
    assert not any(accepts(grammar, f'"{text}"') for text in (longest + "e", "a" * 64, "-a"))


def test_many_requests_of_one_grammar_get_the_same_masks() -> None:
    grammars = Grammars(str(FOLDER), VOCAB_SIZE)
    grammars._num_mask_threads = 3
    grammar = grammar_of(json_schema={"type": "string", "maxLength": 9})
    constraints: list[Constraint] = []
    for _ in range(100):
        constraints.append(grammars.open(grammar, [], 0))
        for template in grammars._compiled[grammar.kind, grammar.text]:
            template.matcher.result()
    templates = grammars._compiled[grammar.kind, grammar.text]
    assert [len(template.live) for template in templates] == [34, 33, 33]
    masks = np.zeros((len(constraints), grammars.num_words), dtype=np.int32)
    alone = masks[:1].copy()
    drawn = random.Random(0)
    while not constraints[0].is_complete:
        grammars.begin(constraints, masks)()
        assert (masks == masks[0]).all()
        grammars.fill(constraints[:1], alone)
        assert (masks == alone).all()
        token_id = drawn.choice(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")).tolist())
        for constraint in constraints:
            constraint.advance(token_id)
    assert all(constraint.is_complete for constraint in constraints)
    del constraints[1:], constraint
    assert sum(len(template.live) for template in templates) == 1
    grammars.close()


def test_a_grammar_whose_lexer_is_full_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.constraints.grammars._MAX_STATES", 500)
    grammars = demo_grammars()
    grammar = grammar_of(regex="(a|b)*a(a|b){12}c")
    before = grammars.compile(grammar)
    constraint = grammars.open(grammar, [], 0)
    letters = [token_bytes().index(b"a"), token_bytes().index(b"b")]
    drawn = random.Random(0)
    num_tokens = 0
    while not constraint.error:
        constraint.advance(drawn.choice(letters))
        allowed(constraint)
        num_tokens += 1
    assert num_tokens > 10
    assert "cannot be followed any further" in constraint.error
    assert grammars.compile(grammar) is not before
    grammars.compile(grammar).result()
    assert not grammars.open(grammar, letters, 0).template.is_spent
    assert len(grammars._compiled[grammar.kind, grammar.text]) == 1


@pytest.mark.parametrize("params", [{"regex": r"[^\s\S]"}, {"regex": "a[^\\w\\W]"}])
def test_a_pattern_that_matches_no_text_is_refused(params: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^no text fits it: a part of it, such as an empty class, matches nothing$"):
        demo_grammars().open(grammar_of(**params), [], 0)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": r"[^\s\S]"}, "no value fits it: "),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "no value fits required property 'a': "),
    ],
)
def test_a_schema_that_allows_no_value_is_refused(schema: Schema, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}keywords contradict each other, or a pattern fits no text$"):
        demo_grammars().open(grammar_of(json_schema=schema), [], 0)


@pytest.mark.parametrize(
    ("params", "longest"),
    [({}, 1), ({"whitespace": ""}, 0), ({"whitespace": r"[ \n]{0,3}"}, 3), ({"whitespace": "flexible"}, None)],
)
def test_white_space_between_tokens_is_bounded(params: Schema, longest: int | None) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}}}, "required": ["a"]}
    grammar = grammar_of(json_schema={**schema, "additionalProperties": False}, **params)
    longest_run = 0
    for seed in range(20):
        text = text_of(walk(grammar, seed, max_tokens=60)[0])
        longest_run = max(longest_run, max(map(len, "".join(c if c in " \n\t\r" else "x" for c in text).split("x"))))
    assert longest_run == longest if longest is not None else longest_run > 3


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"a{i}": {"type": "object", "required": ["x", "y"], "additionalProperties": False, "properties":
            {"x": {"$ref": f"#/$defs/a{i + 1}"}, "y": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(30)} | {"a30": {}},
         "$ref": "#/$defs/a0"},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]},
        {"type": "array", "minItems": 100_000, "items": {"type": "string"}},
        {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000, "items": {"type": "integer"}}},
        {"type": "string", "pattern": "^((a{0,40}){0,40}){0,40}$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
        {"type": "string", "pattern": "^.*a.{30}.*b.{30}.*c$"},
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b.{{{i + 1}}}c"} for i in range(1, 12)]},
        {"type": "string", "minLength": 5000, "maxLength": 1_000_000},
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
         "$ref": "#/$defs/n"},
        {"properties": {f"p{i}": {"type": "string"} for i in range(256)}},
    ],
)  # fmt: skip
def test_costly_schemas_are_compiled_or_refused_in_time(schema: Schema) -> None:
    """They are within the limits of the library. Each ends with a refusal, an error, or tokens."""
    try:
        grammar = grammar_of(json_schema=schema)
        constraint = demo_grammars().open(grammar, [], 0)
    except ValueError:
        return
    ids: list[int] = []
    while not constraint.is_over and len(ids) < 40:
        ids.append(allowed(constraint)[-1])
        if not constraint.error:
            constraint.advance(ids[-1])
    assert constraint.is_over or len(ids) == 40


def test_grammars_of_tenants_are_compiled_in_turns() -> None:
    turns = Turns(1)
    is_free = Event()
    done: list[str] = []
    blocked = turns.submit("a", is_free.wait)
    futures = [turns.submit("a", partial(done.append, f"a{number}")) for number in range(4)]
    futures += [turns.submit("b", partial(done.append, f"b{number}")) for number in range(2)]
    assert futures[1].cancel()
    is_free.set()
    assert blocked.result(timeout=60)
    wait(futures, timeout=20)
    assert done in (["a0", "b0", "b1", "a2", "a3"], ["b0", "a0", "b1", "a2", "a3"])
    with pytest.raises(ZeroDivisionError):
        turns.submit("a", lambda: 1 // 0).result(timeout=60)
    turns.close()


@pytest.mark.parametrize("vocab_size", [500, 512])
def test_grammar_works_for_a_model_without_an_end_of_text(vocab_size: int) -> None:
    """The library's end token may need another word in each mask."""
    grammars = Grammars(str(FOLDER), vocab_size)
    constraint = grammars.open(Grammar("regex", "[0-9]{2}", eos_token_ids=()), [], 0)
    for _ in range(2):
        assert not constraint.is_complete
        masks = np.full((2, grammars.num_words), 7, dtype=np.int32)
        grammars.fill([constraint], masks[1:])
        assert not constraint.error
        ids = np.flatnonzero(np.unpackbits(masks[1:].view(np.uint8), bitorder="little"))
        assert ids.size
        assert all(constraint.tokens[token_id].isdigit() for token_id in ids)
        assert (masks[0] == 7).all()
        constraint.advance(next(int(token_id) for token_id in ids if len(constraint.tokens[token_id]) == 1))
    assert constraint.is_complete
