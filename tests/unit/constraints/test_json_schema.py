"""JSON schemas: keywords that are refused, with name and pointer, and the compiled schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from aioengine.constraints.json_schema import MAX_BYTES, compile_schema
from aioengine.errors import UnsupportedSchemaError

Schema = dict[str, Any]


def made(schema: object) -> Schema:
    return compile_schema(json.dumps(schema))


def closed(*names: str) -> Schema:
    """Return the keywords of an object with only these properties."""
    return {"properties": {name: {"type": "integer"} for name in names}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"not": {}}, "", "not"),
        ({"properties": {"a": {"uniqueItems": True}}}, "/properties/a", "uniqueItems"),
        ({"items": {"contains": {"const": 1}}}, "/items", "contains"),
        ({"maxlength": 3}, "", "maxlength"),
        ({"if": {}, "then": {}}, "", "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "", "propertyNames"),
        ({"$defs": {"a": {"unevaluatedItems": False}}, "$ref": "#/$defs/a"}, "/$defs/a", "unevaluatedItems"),
        ({"properties": {"a/b": {"pattern": "(?=x)"}}}, "/properties/a~1b/pattern", "pattern"),
        ({"anyOf": [{}, {"format": "iri"}]}, "/anyOf/1", "format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "", "oneOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "", "oneOf"),
        ({"enum": ["a", "bb"], "maxLength": 1}, "", "enum"),
        ({"type": "number", "multipleOf": 0.1}, "", "multipleOf"),
        ({"type": "integer", "multipleOf": 99991}, "", "multipleOf"),
        ({"type": "integer", "maximum": 2**60}, "", "maximum"),
        ({"minimum": 1e-300}, "", "minimum"),
        ({"minimum": 3, "maximum": 2}, "", "minimum"),
        ({"minLength": 3, "maxLength": 2}, "", "minLength"),
        ({"$ref": "https://example.org/schema"}, "", "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "", "$ref"),
        ({"anyOf": [{"allOf": [{"$ref": "#"}]}]}, "/anyOf/0/allOf/0", "$ref"),
        ({"items": [{"type": "integer"}]}, "", "items"),
        ({"minProperties": 2}, "", "minProperties"),
        ({"maxProperties": 2}, "", "maxProperties"),
        ({"patternProperties": {"^a": {}}}, "", "patternProperties"),
        (
            {"properties": {"ab": {}}, "patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
            "",
            "patternProperties",
        ),
        ({"items": {"minProperties": 2, **closed("a", "b", "c")}}, "/items", "minProperties"),
        ({"maxProperties": 2, **closed("a", "b", "c")}, "", "maxProperties"),
        ({"maxProperties": 0, **closed("a")}, "", "maxProperties"),
        ({"minProperties": 4, "required": ["a"], **closed("a", "b", "c")}, "", "minProperties"),
        ({"minProperties": 3, "required": ["a"], **closed("a", "b", "c")}, "", "minProperties"),
        ({"maxProperties": 1, "required": ["a", "b"], **closed("a", "b", "c")}, "", "maxProperties"),
        ({"minProperties": 1, **closed()}, "", "minProperties"),
        ({"required": ["a"], "additionalProperties": False}, "", "required"),
        ({"properties": {f"p{i}": {} for i in range(300)}}, "", "properties"),
        ({"type": "string", "maxLength": 10**9}, "", "maxLength"),
        ({"anyOf": [{"anyOf": [{}] * 200}] * 20}, "/anyOf/10/anyOf/36", "schema"),
        ({"anyOf": [{"pattern": "a" * 5000}] * 2}, "/anyOf/1", "pattern"),
        ({"patternProperties": {"a" * 9000: {}}, "additionalProperties": False}, "", "patternProperties"),
        ({"allOf": [{}] * 50}, "", "allOf"),
        ({"enum": [f"value {i}" for i in range(20_000)]}, "", "json_schema"),
        ({"items": {"const": {"a": ["\x1b[0m"]}}}, "/items", "const"),
        ({"enum": ["a", "\x7f"]}, "", "enum"),
        *[({"type": "integer", "const": value}, "", "const") for value in (2**53 + 1, -(2**63), 10**20, 1e20)],
        *[({"enum": [{"a": [value]}]}, "", "enum") for value in (2**64 - 1, 10**400, 0.1234567890123456, 1e-23)],
        (False, "", "false"),
    ],
)  # fmt: skip
def test_keywords_that_are_not_enforced_are_refused_with_their_pointer(
    schema: object, pointer: str, keyword: str
) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        made(schema)
    assert (caught.value.pointer, caught.value.keyword) == (pointer, keyword)
    assert repr(keyword) in str(caught.value) or keyword == "pattern"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"pattern": "a" * 9000},
            "'pattern' at # is too long: all patterns together may have 8,192 characters, each counts 8 more",
        ),
        ({"allOf": [{"anyOf": [{}] * 250}] * 10}, "is too much: at most 2,048 subschemas are enforced"),
        ({"items": [{}]}, "'items' at # is a list, as in older JSON schemas; write 'prefixItems'"),
        (
            {"minProperties": 3, "required": ["a"], **closed("a", "b", "c")},
            "'minProperties' at # is 3; with 1 required property, only 2 can be enforced",
        ),
        (
            {"minProperties": 4, "required": ["a", "b"], **closed("a", "b", "c")},
            "'minProperties' at # is 4; with 2 required properties of 3, no value is valid",
        ),
    ],
)
def test_refusals_name_the_limit(schema: object, message: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=re.escape(message)):
        made(schema)


OWN = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"b": OWN}},
        {"properties": {"b": OWN}, "required": ["b"]},
        {"type": ["object", "null"], "properties": {"b": OWN}, "required": ["b"]},
        {"type": "object", "properties": {"b": {"anyOf": [OWN, {"type": "null"}]}}, "required": ["b"]},
        {"type": "array", "items": OWN},
        {"type": "array", "prefixItems": [{}, OWN], "minItems": 1},
        {"type": "string", "required": 1, "properties": 1, "prefixItems": 1, "minItems": "1"},  # without effect
    ],
)
def test_recursion_that_can_end_is_accepted(schema: Schema) -> None:
    assert made({"$defs": {"a": schema}, **OWN})["$defs"].keys() == {"d0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"b": OWN}, "required": ["b"]},
        {"type": ["object", "array"], "additionalProperties": OWN, "required": ["b"], "items": OWN, "minItems": 1},
        {"type": "array", "prefixItems": [{}, OWN], "minItems": 2},
        {"type": "array", "minItems": 1, "items": {"oneOf": [{"type": "array", "minItems": 1, "items": OWN}]}},
        {"type": "array", "minItems": 1, "items": {"allOf": [{}, OWN]}},
    ],
)
def test_schema_that_can_never_end_is_refused_by_its_reference(schema: Schema) -> None:
    with pytest.raises(UnsupportedSchemaError, match=r"'\$ref' at /properties/c '#/\$defs/a' can never end") as caught:
        made({"$defs": {"a": schema}, "type": "object", "properties": {"c": OWN}, "required": ["c"]})
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/c", "$ref")


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"type": "text"}, "'type' at # must be one of array, boolean"),
        ({"properties": {"a": {"minLength": -1}}}, "'minLength' at /properties/a must be an integer"),
        ({"properties": []}, "'properties' at # must be an object"),
        ({"required": [1]}, "'required' at # must be a list of names"),
        ({"anyOf": []}, "'anyOf' at # must be a list of schemas"),
        ({"$ref": "#/$defs/a"}, "a reference to something in this schema"),
        ({"items": 5}, "'schema' at /items must be an object or a boolean"),
        ({"pattern": "("}, "not a valid Python regular expression"),
        (5, "must be an object or a boolean"),
    ],
)
def test_invalid_schema_raises_value_error(schema: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made(schema)


@pytest.mark.parametrize("text", ["{", "nonsense", "[" * 100_000, '{"const": NaN}', '{"const": 1' + "0" * 5000 + "}"])
def test_invalid_json_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="it is not valid JSON"):
        compile_schema(text)


def test_deep_and_long_schemas_are_refused_without_work() -> None:
    deep: Schema = {"type": "integer"}
    for _ in range(80):
        deep = {"items": deep}
    with pytest.raises(UnsupportedSchemaError, match="more than 64 deep"):
        made(deep)
    with pytest.raises(UnsupportedSchemaError, match="characters"):
        made({"description": "x" * 2_000_000})
    assert made({"description": "x" * MAX_BYTES, "type": "null"}) == {"type": "null"}


def test_annotations_are_removed_and_property_names_kept() -> None:
    schema = {"title": "T", "type": "object", "properties": {"title": {"description": "d", "type": "string"}}}
    assert made(schema) == {"type": "object", "properties": {"title": {"type": "string"}}}


def test_references_are_kept_and_their_targets_compiled_once() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a~1b"}}, "additionalProperties": False}
    schema = made({"$ref": "#/$defs/a~1b", "$defs": {"a/b": node, "unused": {"not": {}}}})
    assert schema["$ref"] == "#/$defs/d0"
    assert schema["$defs"]["d0"]["properties"] == {"next": {"$ref": "#/$defs/d0"}}


def test_one_of_with_exclusive_branches_becomes_any_of() -> None:
    assert made({"oneOf": [{"type": "integer"}, {"type": "string"}]}) == {
        "anyOf": [{"type": "integer"}, {"type": "string"}]
    }
    assert "anyOf" in made({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]})
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}}}
    first, second = made({"oneOf": [{"$ref": "#/$defs/cat"}, dog], "$defs": {"cat": cat}})["anyOf"]
    assert first == {"$ref": "#/$defs/d0"}
    assert second["allOf"][1] == {"type": "object", "required": ["kind"]}


def test_bounds_include_their_value() -> None:
    assert made({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5}) == {
        "type": "integer", "minimum": 1, "maximum": 2,
    }  # fmt: skip
    schema = made({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1})
    assert 0 < schema["minimum"] < 1e-6
    assert 1 - 1e-10 < schema["maximum"] < 1
    schema = made({"minimum": -7.40691406124409e-09, "maximum": 918288075560667.5})
    assert -7.40691406124409e-09 < schema["minimum"] < -7.40691e-09
    assert 918288075560660 < schema["maximum"] < 918288075560667.5


def test_infinite_constants_are_refused() -> None:
    with pytest.raises(UnsupportedSchemaError, match="'const' at # has inf"):
        compile_schema('{"const": 1e999}')
