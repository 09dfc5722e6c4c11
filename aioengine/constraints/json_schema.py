"""JSON schemas: what cannot be enforced is refused, and the rest is brought into the form that grammars are made of.

Every value that the compiled schema allows is valid under the schema that was given; where the two cannot be the same,
the compiled one is narrower:

- Properties come in the order of the schema, those that are only required at the end.
- ``oneOf`` is allowed where its branches exclude each other: by their types, or by a property with other constants in
  each branch, which is then required.
- Patterns mean what ECMAScript and Python agree on: ``\\d`` and ``\\w`` are ASCII.
- Exclusive bounds of numbers that are no integers, and those of more than 15 digits, become the next number of 15
  digits: what is written with more would be rounded to the bound, or the bound itself would be.
- Text has no ``\\u`` escapes, and so no control characters but those with an escape of two characters.

Annotations are left out. A keyword that is not known is refused: it may be a misspelt one.
"""

from __future__ import annotations

import json
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from aioengine.api.checks import did_you_mean
from aioengine.constraints.one_of import TYPES, exclusive
from aioengine.constraints.python_regex import translate
from aioengine.constraints.schema_values import (
    Schema,
    Subschema,
    check_constant,
    compile_counts,
    compile_number,
    compile_string,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_BYTES: Final = 65_536
MAX_CHARACTERS: Final = 262_144
"""Of the text with its annotations."""
MAX_DEPTH: Final = 64
MAX_OPTIONAL: Final = 256
"""Optional properties of an object; the parser keeps several entries for each."""
MAX_SCHEMAS: Final = 2048
"""Schemas within a schema, or within a structural tag."""
MAX_PATTERN_CHARACTERS: Final = 8192
"""Of all patterns of a schema, or of a structural tag."""
CHARACTERS_PER_PATTERN: Final = 8
"""Counted of each beside its own."""
MAX_BRANCHES: Final = 256
MAX_ALL_OF: Final = 16

OPTIONS: Final = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options of the library for every schema: with ``\\u``, a listed property could be written as another one."""

_ANNOTATIONS: Final = frozenset(
    (
        "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
        "readOnly", "writeOnly", "discriminator",
    )
)  # fmt: skip
_ENFORCED: Final = frozenset(
    (
        "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf",
        "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "items", "prefixItems", "minItems", "maxItems",
    )
)  # fmt: skip
_NOT_ENFORCED: Final = frozenset(
    (
        "$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "id",
        "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems", "additionalItems", "contains", "minContains", "maxContains",
        "uniqueItems", "contentEncoding", "contentMediaType", "contentSchema",
    )
)  # fmt: skip
"""Keywords of JSON Schema, which are not misspelt."""


class Budget:
    """What the schemas and patterns of a parameter may have together: each takes time at the call."""

    def __init__(self) -> None:
        self._num_schemas = 0
        self._num_pattern_characters = 0

    def take_schema(self, place: Subschema) -> None:
        """Raises UnsupportedSchemaError: there are too many."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            place.refuse("schema", f"is one of more than {MAX_SCHEMAS:,}")

    def take_patterns(self, place: Subschema, found: Iterable[object]) -> None:
        """Raises UnsupportedSchemaError: there are too many."""
        self._num_pattern_characters += sum(
            len(each) + CHARACTERS_PER_PATTERN for each in found if isinstance(each, str)
        )
        if self._num_pattern_characters > MAX_PATTERN_CHARACTERS:
            place.refuse("pattern", f"is one of several with more than {MAX_PATTERN_CHARACTERS:,} characters together")


def compiled(text: str, budget: Budget | None = None) -> Schema:
    """The schema ``text`` (JSON) in the form that grammars are made of. ``budget``: of several; None: of its own.

    Raises:
        ValueError: it is no JSON, or no JSON schema.
        UnsupportedSchemaError: something in it cannot be enforced, or it is too large; with ``pointer`` and
            ``keyword``.
    """
    root = Subschema({}, "", 0)
    if len(text) > MAX_CHARACTERS:
        root.refuse("json_schema", f"has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        message = f"it is no JSON text: {error}"
        raise ValueError(message) from None
    try:
        compiler = _Compiler(schema, budget or Budget())
        found = compiler.compile()
        size = len(json.dumps(found))
    except RecursionError:
        root.refuse("json_schema", "is nested too deeply")
    if size > MAX_BYTES:
        root.refuse("json_schema", f"has {size:,} bytes without its annotations; at most {MAX_BYTES:,} are enforced")
    compiler.check_constants()
    return found


def _refuse_constant(name: str) -> NoReturn:
    message = f"{name} is no JSON"
    raise ValueError(message)


class _Compiler:
    """One schema. References stay references: each target is compiled once, into ``$defs``."""

    def __init__(self, root: object, budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._names: dict[str, str] = {}  # a reference -> the name of its target in $defs
        self._places: dict[str, Subschema] = {}  # where each reference was found first
        self._definitions: Schema = {}
        self._waiting: list[str] = []
        self._constants: list[tuple[Subschema, str]] = []

    def compile(self) -> Schema:
        found = self._schema(self._root, "", 0)
        while self._waiting:
            reference = self._waiting.pop()
            target = self._target(reference, Subschema({}, reference[1:], 0))
            self._definitions[self._names[reference]] = self._schema(target, reference[1:], 0)
        self._check_loops()
        if found is False:
            Subschema({}, "", 0).refuse("false", "allows no value")
        found = {} if found is True else found
        return {**found, "$defs": self._definitions} if self._definitions else found

    def check_constants(self) -> None:
        """Behind all limits of size, for each value in each of them is looked at."""
        for place, keyword in self._constants:
            check_constant(place, keyword)

    def _schema(self, schema: object, pointer: str, depth: int) -> Any:
        """Compiled, a dict or a boolean."""
        if isinstance(schema, bool):
            return schema
        place = Subschema(cast("Schema", schema), pointer, depth)
        if not isinstance(schema, dict):
            place.wrong("schema", "an object or a boolean", schema)
        if depth > MAX_DEPTH:
            place.refuse("schema", f"is nested more than {MAX_DEPTH} deep")
        patterns = place.given.get("patternProperties")
        self._budget.take_schema(place)
        self._budget.take_patterns(
            place, (place.given.get("pattern"), *(patterns if isinstance(patterns, dict) else ()))
        )
        for keyword in place.given:
            if keyword not in _ENFORCED and keyword not in _ANNOTATIONS and not keyword.startswith("x-"):
                hint = "" if keyword in _NOT_ENFORCED else did_you_mean(keyword, _ENFORCED | _ANNOTATIONS)
                place.refuse(keyword, f"is not enforced{hint}; leave it out, and check for it yourself")
        found = self._any_type(place)
        types = found.get("type", TYPES)
        allowed = {types} if isinstance(types, str) else set(types)
        if "string" in allowed:
            made = compile_string(place)
            found |= made | ({"allOf": [*found.get("allOf", ()), *made["allOf"]]} if "allOf" in made else {})
        if allowed & {"number", "integer"}:
            found |= compile_number(place, is_integer="number" not in allowed)
        if "object" in allowed:
            found |= self._object(place)
        if "array" in allowed:
            found |= self._array(place)
        return found

    # ------------------------------------------------------------ keywords of all types

    def _any_type(self, place: Subschema) -> Schema:
        given, found = place.given, dict[str, Any]()
        if "type" in given:
            found["type"] = _types(place)
        for keyword in ("enum", "const"):
            if keyword in given:
                _check_alone(place, keyword)
                self._constants.append((place, keyword))
                found[keyword] = given[keyword]
        if "$ref" in given:
            found["$ref"] = self._reference(place)
        for keyword in ("anyOf", "allOf"):
            if keyword in given:
                found[keyword] = self._branches(place, keyword)
        if "oneOf" in given:
            if "anyOf" in given:
                place.refuse("oneOf", "is not enforced together with 'anyOf'")
            found["anyOf"] = exclusive(place, self._branches(place, "oneOf"), self._followed)
        return found

    def _branches(self, place: Subschema, keyword: str) -> list[Any]:
        branches = place.given[keyword]
        if not isinstance(branches, list) or not branches:
            place.wrong(keyword, "a list of schemas", branches)
        listed = cast("list[object]", branches)
        limit = MAX_ALL_OF if keyword == "allOf" else MAX_BRANCHES
        if len(listed) > limit:
            place.refuse(keyword, f"has more than {limit} entries")
        return [self._schema(each, place.at(keyword, index), place.depth + 1) for index, each in enumerate(listed)]

    # ------------------------------------------------------------ references

    def _reference(self, place: Subschema) -> str:
        reference = place.given["$ref"]
        if not isinstance(reference, str):
            place.wrong("$ref", "a string", reference)
        if reference != "#" and not reference.startswith("#/"):
            place.refuse("$ref", f"{reference[:80]!r} is no reference into this schema")
        if reference not in self._names:
            self._target(reference, place)
            self._places[reference] = place
            self._names[reference] = f"d{len(self._names)}"
            self._waiting.append(reference)
        return f"#/$defs/{self._names[reference]}"

    def _target(self, reference: str, place: Subschema) -> object:
        found = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = cast("Schema", found)[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(cast("list[object]", found)):
                found = cast("list[object]", found)[int(key)]
            else:
                place.wrong("$ref", "a reference to something in this schema", reference)
        return found

    def _check_loops(self) -> None:
        """A schema that refers to itself without anything between would never end. Every target is compiled before."""
        graph = {each: _same_value(self._target(each, Subschema({}, each[1:], 0))) for each in self._names}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            reference = next(each for each in self._names if each in error.args[1])
            self._places[reference].refuse("$ref", f"{reference[:80]!r} refers to itself")

    def _followed(self, schema: object) -> Schema:
        """What a schema that is but a reference refers to."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            given = cast("Schema", schema)
            if given.keys() - _ANNOTATIONS != {"$ref"}:
                return given
            schema = self._target(given["$ref"], Subschema(given, "", 0))
        return {}

    # ------------------------------------------------------------ objects and arrays

    def _object(self, place: Subschema) -> Schema:
        found: Schema = {}
        names = _required(place)
        made = self._each(place, "properties")
        others: Any = True
        if "additionalProperties" in place.given:
            pointer = place.at("additionalProperties")
            others = self._schema(place.given["additionalProperties"], pointer, place.depth + 1)
            found["additionalProperties"] = others
        if patterns := self._pattern_properties(place):
            found["patternProperties"] = patterns
        for name in names:
            if others is False and name not in made:
                place.refuse("required", f"names {name[:80]!r}, which additionalProperties rules out")
        made |= {name: others for name in names if name not in made}
        if len(made) - len(names) > MAX_OPTIONAL:
            place.refuse("properties", f"has more than {MAX_OPTIONAL} optional ones")
        if made:
            found["properties"] = made
        if names:
            found["required"] = names
        return found | _num_properties(place, found)

    def _each(self, place: Subschema, keyword: str) -> Schema:
        """The compiled schemas of a keyword that has one for each name."""
        schemas = place.given.get(keyword, {})
        if not isinstance(schemas, dict):
            place.wrong(keyword, "an object", schemas)
        return {
            name: self._schema(each, place.at(keyword, name), place.depth + 1)
            for name, each in cast("Schema", schemas).items()
        }

    def _pattern_properties(self, place: Subschema) -> Schema:
        """They stand alone: a name that a pattern matches would have to fit the pattern's schema and its own."""
        made = self._each(place, "patternProperties")
        if made and place.given.get("additionalProperties") is not False:
            place.refuse("patternProperties", 'is enforced with "additionalProperties": false alone')
        if made and (place.given.get("properties") or place.given.get("required")):
            place.refuse("patternProperties", "is not enforced together with 'properties' or 'required'")
        return {
            f"^(?:{translate(pattern, pointer=place.at('patternProperties', pattern), is_searched=True)})$": each
            for pattern, each in made.items()
        }

    def _array(self, place: Subschema) -> Schema:
        given = place.given
        found: Schema = dict(compile_counts(place, "minItems", "maxItems"))
        if "items" in given:
            if isinstance(given["items"], list):
                place.refuse("items", "as a list is of an older JSON schema; write 'prefixItems'")
            found["items"] = self._schema(given["items"], place.at("items"), place.depth + 1)
        if "prefixItems" in given:
            found["prefixItems"] = self._branches(place, "prefixItems")
        return found


def _types(place: Subschema) -> str | list[str]:
    value = place.given["type"]
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    if not listed or any(each not in TYPES for each in listed):
        place.wrong("type", f"one of {', '.join(TYPES)}, or a list of these", value)
    return cast("str | list[str]", value)


def _check_alone(place: Subschema, keyword: str) -> None:
    """Constants stand alone or beside a type: beside other keywords some of them may not be allowed."""
    value = place.given[keyword]
    if keyword == "enum" and (not isinstance(value, list) or not value):
        place.wrong("enum", "a list of values", value)
    others = (place.given.keys() & _ENFORCED) - {keyword, "type"}
    if others:
        place.refuse(keyword, f"is not enforced together with {min(others)!r}")


def _required(place: Subschema) -> list[str]:
    value = place.given.get("required", [])
    if not isinstance(value, list) or any(not isinstance(name, str) for name in cast("list[object]", value)):
        place.wrong("required", "a list of names", value)
    return list(dict.fromkeys(cast("list[str]", value)))


def _num_properties(place: Subschema, found: Schema) -> Schema:
    """Compile ``minProperties`` and ``maxProperties``.

    They are enforced if all properties are listed: an unlisted property could be generated twice. The library counts
    at most one optional property.
    """
    limits = dict(compile_counts(place, "minProperties", "maxProperties"))
    num_required, num_listed = len(found.get("required", ())), len(found.get("properties", ()))
    if limits.get("minProperties", 1) <= num_required:
        limits.pop("minProperties", None)
    is_closed = found.get("additionalProperties") is False and "patternProperties" not in found
    for keyword in limits:
        if not is_closed:
            place.refuse(keyword, 'is enforced with "additionalProperties": false alone')
    if limits.get("maxProperties", 0) >= num_listed:
        limits.pop("maxProperties", None)
    for keyword, limit in limits.items():
        reason = f"is {limit}, and {num_required} of {num_listed} properties are required"
        if not num_required <= limit <= num_listed:
            place.refuse(keyword, f"{reason}: no value is valid")
        if limit != num_required + 1:
            place.refuse(keyword, f"{reason}: only {num_required + 1} can be enforced")
    return limits


def _same_value(schema: object) -> list[str]:
    """The references of a schema that apply to the very value that it applies to."""
    if not isinstance(schema, dict):
        return []
    given, found = cast("Schema", schema), list[str]()
    if isinstance(given.get("$ref"), str):
        found.append(given["$ref"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = given.get(keyword)
        if isinstance(branches, list):
            found += [each for branch in cast("list[object]", branches) for each in _same_value(branch)]
    return found
