"""The sampling parameters of structured output, and their grammar."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic
import pytest

from aioengine import SamplingParams
from aioengine.constraints import parameters
from aioengine.constraints.json_schema import compile_schema
from aioengine.errors import UnsupportedSchemaError
from aioengine.frontend.intake.requests import CallRequest, generate_request
from tests.engine.engine_double import World
from tests.kit.grammar_walks import demo_grammars, grammar_of, text_of, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


GENEROUS_S = 2.0
"""Of the time of a thread: 50 ms are usual, a slow or busy machine takes several times as long."""


@dataclass
class Cat:
    name: str
    lives: int = 9


class Dog(msgspec.Struct):
    breed: str
    owner: Cat | None = None


class Bird(pydantic.BaseModel):
    can_fly: bool
    wings: int = pydantic.Field(ge=0, le=2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex are given together; .* keep one"),
        ({"json_object": True, "choice": ["a"]}, "json_object and choice are given together; .* keep one"),
        (
            {"whitespace": "flexible"},
            "whitespace='flexible' is given without .* json_schema, json_object, structural_tag$",
        ),
        ({"reasoning_end": "</think>"}, "reasoning_end='</think>' is given without a constraint; add one of .*regex"),
        ({"regex": "a", "max_thinking_tokens": 3}, "max_thinking_tokens=3 is given without reasoning_end.*; add"),
        ({"regex": "a", "whitespace": "flexible"}, "whitespace='flexible' is given with regex; .*leave it out"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(params: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams.parse(params)


def test_an_object_that_has_no_schema_is_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match=r"^json_schema must be JSON text, .* got <object .* of type object: [^\n]*$"):
        SamplingParams(json_schema=object())


@dataclass
class Owner:
    itself: Owner
    cats: list[Cat]
    anything: object


@dataclass
class House:
    owner: Owner


@pytest.mark.parametrize("of", [Owner, House])
def test_error_names_the_type_without_a_schema(of: type) -> None:
    with pytest.raises(TypeError, match=r" of type type: type <class 'object'> is not supported$"):
        SamplingParams(json_schema=of)


@pytest.mark.parametrize("value", [Cat("Tom"), Dog("Pug"), Bird(can_fly=True, wings=2)])
def test_instance_is_refused_with_the_advice_to_pass_its_class(value: object) -> None:
    name = type(value).__name__
    with pytest.raises(TypeError, match=f"^json_schema is an object of the class {name}; pass the class {name} itself"):
        SamplingParams.parse({"json_schema": value})


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag", "reasoning_end"])
def test_empty_text_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must have at least one character, got ''; leave it out"):
        SamplingParams.parse({name: ""})


def test_empty_list_of_token_ids_is_refused_as_reasoning_end() -> None:
    with pytest.raises(ValueError, match=r"^reasoning_end must have at least one token id, got \[\]; leave it out"):
        SamplingParams(regex="a", reasoning_end=[])


def test_empty_schema_is_a_constraint_and_false_is_none() -> None:
    off = {"json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "json_object": False}
    assert SamplingParams.parse(off) == SamplingParams()
    assert grammar_of(json_schema={}) == grammar_of(json_schema="$$ANY$$")


@pytest.mark.parametrize("of", [Cat, Dog, Bird])
def test_classes_give_their_schema_without_other_fields(of: type) -> None:
    grammar = grammar_of(json_schema=of)
    for seed in range(8):
        ids, is_complete = walk(grammar, seed)
        if is_complete:
            value = Bird(**json.loads(text_of(ids))) if of is Bird else msgspec.json.decode(text_of(ids), type=of)
            assert isinstance(value, of)
            assert set(json.loads(text_of(ids))) <= {*of.__annotations__}


def test_parameters_can_be_encoded_and_read_again() -> None:
    params = SamplingParams(json_schema=Cat, reasoning_end=[1, 2], max_thinking_tokens=4)
    again = msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams)
    assert again == params
    assert (
        msgspec.json.decode(b'{"json_schema": {"type": "null"}}', type=SamplingParams).json_schema == '{"type": "null"}'
    )


def test_the_same_grammar_is_compiled_once() -> None:
    first, second = (grammar_of(choice=["a", "b"], ignore_eos=is_ignored) for is_ignored in (False, True))
    assert demo_grammars().compile(first) is demo_grammars().compile(second)


def check_all(request: CallRequest) -> None:
    """Check the remaining rows of a call like a thread."""
    while not request.is_checked:
        request.check_more()


def test_equal_constraints_of_a_large_batch_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(parameters, "compile_schema", lambda text: checked.append(text) or compile_schema(text))
    schemas = [{"enum": [f"schema {number}", "x" * 16_000]} for number in range(32)]
    params = [{"json_schema": dict(schemas[row % 32])} for row in range(256)]
    request = generate_request(["a"] * 256, params, None, stream=False, options={})
    check_all(request)
    assert len(checked) == 32
    assert len(request.params) == 256


def of_shared_parts() -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(60):
        schema = {"anyOf": [schema, schema]}
    return schema


def of_itself() -> dict[str, object]:
    schema: dict[str, object] = {}
    schema["items"] = schema
    return schema


MANY = list(range(140_000))


@pytest.mark.parametrize("make", [of_shared_parts, of_itself, lambda: {"enum": MANY}])
def test_a_constraint_that_is_too_large_fails_only_its_row(make: Callable[[], dict[str, object]]) -> None:
    params: list[object] = [{"json_schema": make()} for _ in range(5)]
    with pytest.raises(
        ValueError, match="more than 262,144 characters as JSON, which is the limit, or contains itself"
    ):
        generate_request(["a"] * 5, params, None, stream=False, options={})
    request = generate_request(["a"] * 5, params, None, stream=False, options={"return_exceptions": True})
    check_all(request)
    assert all(isinstance(prompt, ValueError) for prompt in request.prompts)


def test_a_wrong_constraint_that_rows_share_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(parameters, "compile_schema", lambda text: checked.append(text) or compile_schema(text))
    params = [{"json_schema": {"not": {}}}] * 9
    request = generate_request(["a"] * 9, params, None, stream=False, options={"return_exceptions": True})
    assert all(isinstance(prompt, UnsupportedSchemaError) for prompt in request.prompts)
    assert len(checked) == 1


def test_n_is_read_before_other_parameters_are_checked() -> None:
    rows: list[object] = [{"regex": "("}, {"n": 2}, {"n": 2}]
    request = generate_request(["a"] * 3, rows, None, stream=False, options={"return_exceptions": True})
    assert (request.num_samples, [isinstance(prompt, ValueError) for prompt in request.prompts]) == (
        2,
        [True, False, False],
    )


async def test_engine_without_a_tokenizer_refuses_constraints() -> None:
    world = World(with_tokenizer=False)
    async with world.engine as engine:
        with pytest.raises(ValueError, match="structured output needs a tokenizer"):
            engine.async_generate(input_ids=[1, 2], sampling_params={"regex": "a"})


@pytest.mark.parametrize(
    ("tag", "match"),
    [
        ({"format": {"type": "tag", "begin": "<", "content": {"type": "nonsense"}, "end": ">"}}, "is not known"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}, "starts with one of"),
        ({"structures": [], "triggers": ["<b"]}, "a list with entries"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not"),
    ],
)
def test_tags_that_cannot_be_enforced_are_refused(tag: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplingParams(structural_tag=tag)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"regex": "(a"}, ": it is not a valid Python regular expression"),
        ({"regex": "a(?=b)"}, " cannot be enforced: it has lookaround; write it without"),
        ({"json_schema": "{"}, ": it is not valid JSON"),
        ({"json_schema": '{"not": {}}'}, " cannot be enforced: 'not' at # is not enforced; leave it out"),
        ({"json_schema": '{"contains": {}}'}, " cannot be enforced: 'contains' at # is not enforced; leave it out"),
        (
            {"json_schema": '{"maxLenght": 3}'},
            " cannot be enforced: 'maxLenght' at # is not enforced (did you mean 'maxLength'?); leave it out",
        ),
        ({"json_schema": '{"type": "string", "pattern": "(?=a)"}'}, " cannot be enforced: '(?=a)' at /pattern: it has"),
        ({"structural_tag": '{"format": {"type": "regex", "pattern": "("}}'}, ": '(' at /format/pattern: it is no"),
        (
            {"structural_tag": '{"format": {"type": "json_schema", "json_schema": {"not": {}}}}'},
            " cannot be enforced: in the schema at /format/json_schema, 'not' at # is not enforced; leave it out",
        ),
        ({"json_object": True, "whitespace": "(?)"}, ": it is not a valid Python regular expression"),
    ],
)
def test_refusals_name_the_parameter_and_its_value(params: Mapping[str, Any], why: str) -> None:
    name, value = list(params.items())[-1]
    with pytest.raises(ValueError, match="(?s)^" + re.escape(f"{name}={value!r}{why}")):
        SamplingParams(**params)


def test_tags_allow_only_their_parts() -> None:
    tag = {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                {
                    "type": "or",
                    "elements": [
                        {"type": "const_string", "value": "yes é"},
                        {"type": "json_schema", "json_schema": {"type": "boolean"}},
                        {"type": "regex", "pattern": "[0-9/]{3}"},
                    ],
                },
            ],
        }
    }
    grammar = grammar_of(structural_tag=tag)
    constraint = demo_grammars().open(grammar, [], 0)
    single = {data: token_id for token_id, data in enumerate(constraint.tokens) if len(data) == 1}

    def accepts(text: str) -> bool:
        tried = constraint.matcher.deep_copy()
        ids = [single[bytes([byte])] for byte in text.encode()]
        return tried.try_consume_tokens(ids) == len(ids) and tried.is_accepting()

    good = ["<t>a\nb</t>yes é", "<t></t>true", "<t>x</t>1/2"]
    bad = ["yes é", "<t>a</t>no", "<t>a", "<t>a</t>b</t>true"]
    assert [accepts(text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


def test_a_schema_that_shares_its_parts_is_refused_before_it_becomes_text() -> None:
    schema = of_shared_parts()
    with pytest.raises(ValueError, match="json_schema has more than 262,144 characters as JSON"):
        SamplingParams(json_schema=schema)


def test_counts_that_are_not_integers_are_named() -> None:
    with pytest.raises(ValueError, match="'minLength' at # must be an integer from 0, got inf"):
        SamplingParams.parse({"json_schema": '{"minLength": 1e999}'})


CHINESE = "".join(map(chr, range(0x4E00, 0x4E00 + 18_000)))
CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1000)}
STRUCTURES = [{"begin": f"b{i}", "schema": {}, "end": ""} for i in range(1000)]


@pytest.mark.parametrize(
    "params",
    [
        {"choice": [CHINESE[i : i + 13] for i in range(10_000)]},
        {"choice": [f"{i:012}" for i in range(10_000)]},
        {"regex": f"(?i){CHINESE[:2700]}"},
        {"regex": f"(?i)[{CHINESE[:2700]}]"},
        {"regex": "(?i)" + "".join(f"[{chr(i % 10 + 48)}-{chr(i % 26 + 97)}]" for i in range(1600))},
        {"json_schema": {"$ref": "#/$defs/d0", "$defs": CHAIN | {"d1000": {}}}},
        {"json_schema": {"anyOf": [{"pattern": f"(?i){CHINESE[i : i + 60]}"} for i in range(250)]}},
        {"json_schema": {"anyOf": [{"anyOf": [{"pattern": f"{i}"}] * 100} for i in range(20)]}},
        {"structural_tag": {"structures": STRUCTURES, "triggers": ["a"] * 20_000 + ["b"]}},
        {"structural_tag": {"format": {"type": "or", "elements": [{"type": "regex", "pattern": CHINESE[i : i + 50]}
            for i in range(400)]}}},
        {"structural_tag": {"format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"const": i}}
            for i in range(2000)]}}},
    ],
)  # fmt: skip
def test_check_of_a_constraint_returns_quickly(params: Mapping[str, Any]) -> None:
    text = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in params.items()}
    SamplingParams.parse({"json_schema": {}})  # slow imports
    begun_at = time.thread_time()
    with contextlib.suppress(ValueError):
        SamplingParams.parse(text)
    assert time.thread_time() - begun_at < GENEROUS_S


@pytest.mark.parametrize(
    "params", [{"regex": r"\w" * 2000}, {"json_schema": {"anyOf": [{"pattern": r"\W" * 400}] * 8}}]
)
def test_constraints_that_take_long_to_compile_are_refused(params: Mapping[str, Any]) -> None:
    with pytest.raises(UnsupportedSchemaError, match="too many Unicode classes"):
        SamplingParams.parse(params)


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": {"x" * 100_000: 1}},
        {"json_schema": {"properties": {"x" * 50_000: {"not": {}}}}},
        {"structural_tag": {"format": {"type": "x" * 100_000}}},
        {"ebnf": "start: " + "x" * 60_000},
        {"ebnf": f'start: %json {{"{"x" * 60_000}": 1}}'},
    ],
)
def test_errors_are_cut_to_a_readable_length(params: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="x") as caught:
        demo_grammars().compile(grammar_of(**params)).result(timeout=60)
    assert len(str(caught.value)) < 900
