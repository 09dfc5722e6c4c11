"""JSON schemas: refuse keywords that cannot be enforced, and compile the others to the form that grammars use.

The compiled schema never allows a value that is invalid under the original schema. In these cases it allows fewer
values:

- Properties come in the order of the schema. Properties that are only in ``required`` come last.
- ``oneOf`` is enforced if its branches exclude each other: by their types, or by a property that has different
  constants in each branch. This property is then required.
- Patterns have the meaning that ECMAScript and Python share: ``\\d`` and ``\\w`` are ASCII.
- Bounds of non-integers have at most 15 digits, because llguidance rounds longer numbers. An exclusive or longer bound
  becomes the nearest allowed number with 15 digits.
- Strings have no ``\\u`` escapes, and so no control characters without a two-character escape.

Annotations are removed. Unknown keywords are refused, because they may be misspelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NoReturn, cast

from aioengine.api.checks import counted, nearest
from aioengine.constraints.endless_rules import endless_rule
from aioengine.constraints.schema_values import (
    Schema,
    Subschema,
    check_constant,
    compile_counts,
    compile_number,
    compile_pattern,
    compile_string,
)

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def exclusive(schema: Subschema, compiled: list[Any], resolve: Callable[[object], Schema]) -> list[Any]:
    """Return the compiled branches of ``oneOf``, changed so that no value matches two of them.

    resolve: returns the target of a schema that is only a reference.

    Raises:
        UnsupportedSchemaError: types and constants do not show that the branches exclude each other.
    """
    branches = [resolve(branch) for branch in schema.keywords["oneOf"]]
    types = [_types(branch) for branch in branches]
    if sum(map(len, types)) == len(set[str]().union(*types)) or _are_disjoint(map(_constants, branches)):
        return compiled
    if all(branch.get("type") == "object" for branch in branches):
        properties = [cast("Schema", branch.get("properties") or {}) for branch in branches]
        for name in properties[0]:
            if _are_disjoint(_constants(resolve(schemas.get(name, True))) for schemas in properties):
                present = {"type": "object", "required": [name]}
                return [
                    result if name in branch.get("required", ()) else {"allOf": [result, present]}
                    for result, branch in zip(compiled, branches, strict=True)
                ]
    schema.raise_unsupported(
        "oneOf",
        "has branches that may both match; give each another type, or a property with other constants in each, or "
        "write anyOf",
    )


def _types(schema: Schema) -> set[str]:
    """Return the types that a schema may allow. An integer is a number."""
    types = schema.get("type", TYPES)
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _constants(schema: Schema) -> Sequence[object] | None:
    """Return the only values that a schema allows; None: it allows others too."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _are_disjoint(constants: Iterable[Sequence[object] | None]) -> bool:
    """Return whether no two lists share a constant. Only strings count: equal numbers can be written differently."""
    sets: list[set[str]] = []
    for values in constants:
        if values is None or any(not isinstance(value, str) for value in values):
            return False
        sets.append(set(cast("Sequence[str]", values)))
    return sum(map(len, sets)) == len(set[str]().union(*sets))


MAX_BYTES: Final = 65_536
"""Maximum size of the compiled schema."""
MAX_CHARACTERS: Final = 262_144
"""Maximum characters of the JSON text, with annotations."""
MAX_DEPTH: Final = 64
MAX_OPTIONAL: Final = 256
"""Maximum optional properties of an object. llguidance keeps several entries for each."""
MAX_SCHEMAS: Final = 2048
"""Maximum subschemas of one parameter."""
MAX_PATTERN_CHARACTERS: Final = 8192
"""Maximum characters of all patterns of one parameter."""
EXTRA_CHARACTERS_PER_PATTERN: Final = 8
"""Added to the length of each pattern, because a short pattern also takes time."""
MAX_BRANCHES: Final = 256
MAX_ALL_OF: Final = 16

OPTIONS: Final = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options of llguidance for every schema. With ``\\u``, the name of a listed property could be written in two ways."""

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
_KNOWN: Final = _ENFORCED | _ANNOTATIONS
_MIN_SIMILARITY: Final = 0.8
"""Minimum similarity of an unknown keyword to a known one, to suggest the known one. No other keyword of JSON Schema is
so similar to a known one.
"""


class Budget:
    """Limits all schemas and patterns of one parameter together, because each takes time at the call."""

    def __init__(self) -> None:
        self._num_schemas = 0
        self._num_pattern_characters = 0

    def take_schema(self, schema: Subschema) -> None:
        """Count a schema. Raises UnsupportedSchemaError if there are too many."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            schema.raise_unsupported("schema", f"is too much: at most {MAX_SCHEMAS:,} subschemas are enforced")

    def take_pattern(self, schema: Subschema, keyword: str, pattern: object) -> None:
        """Count a pattern of this keyword. Raises UnsupportedSchemaError if all patterns together are too long."""
        if isinstance(pattern, str):
            self._num_pattern_characters += len(pattern) + EXTRA_CHARACTERS_PER_PATTERN
        if self._num_pattern_characters > MAX_PATTERN_CHARACTERS:
            limit = f"all patterns together may have {MAX_PATTERN_CHARACTERS:,} characters"
            schema.raise_unsupported(keyword, f"is too long: {limit}, each counts {EXTRA_CHARACTERS_PER_PATTERN} more")


def compile_schema(text: str, budget: Budget | None = None) -> Schema:
    """Compile a JSON schema, given as JSON text. budget: shared with other schemas; None: a new one.

    Raises:
        ValueError: it is not JSON, or not a JSON schema.
        UnsupportedSchemaError: it is too large, or a part of it cannot be enforced.
    """
    root = Subschema({}, "", 0)
    if len(text) > MAX_CHARACTERS:
        root.raise_unsupported("json_schema", f"has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    try:
        compiler = _Compiler(schema, budget or Budget())
        compiled = compiler.compile()
        size = len(json.dumps(compiled))
    except RecursionError:
        root.raise_unsupported("json_schema", "is nested too deeply")
    if size > MAX_BYTES:
        root.raise_unsupported("json_schema", f"has {size:,} bytes without annotations; the limit is {MAX_BYTES:,}")
    for subschema, keyword in compiler.constants:  # reads every nested value, so only after the check of the size
        check_constant(subschema, keyword)
    return compiled


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


class _Compiler:
    """Compiles one schema. References stay: each target is compiled once, into ``$defs``.

    Attributes:
        constants: the subschemas with ``const`` or ``enum``, and this keyword.
    """

    def __init__(self, root: object, budget: Budget) -> None:
        self.constants: list[tuple[Subschema, str]] = []
        self._root = root
        self._budget = budget
        self._names: dict[str, str] = {}  # reference -> name of its target in $defs
        self._users: dict[str, Subschema] = {}  # reference -> the first schema that has it
        self._definitions: Schema = {}
        self._waiting: list[str] = []
        self._same_value: dict[str, list[str]] = {}  # pointer -> pointers of schemas that apply to the same value
        self._alternatives: dict[str, list[list[str]]] = {}  # rule -> its alternatives, for ``endless_rule``

    def compile(self) -> Schema:
        compiled = self._schema(self._root, "", 0)
        while self._waiting:
            reference = self._waiting.pop()
            target = self._target(reference, self._users[reference])
            self._definitions[self._names[reference]] = self._schema(target, reference[1:], 0)
        self._check_recursion()
        if compiled is False:
            Subschema({}, "", 0).raise_unsupported("false", "allows no value")
        compiled = {} if compiled is True else compiled
        return {**compiled, "$defs": self._definitions} if self._definitions else compiled

    def _schema(self, value: object, pointer: str, depth: int) -> Any:
        """Compile a schema to a dict or a boolean."""
        if isinstance(value, bool):
            return value
        schema = Subschema(cast("Schema", value), pointer, depth)
        if not isinstance(value, dict):
            schema.raise_invalid("schema", "an object or a boolean", value)
        if depth > MAX_DEPTH:
            schema.raise_unsupported("schema", f"is nested more than {MAX_DEPTH} deep")
        self._budget.take_schema(schema)
        self._budget.take_pattern(schema, "pattern", schema.keywords.get("pattern"))
        for keyword in schema.keywords:
            if keyword not in _KNOWN and not keyword.startswith("x-"):
                meant = nearest(keyword, _KNOWN, cutoff=_MIN_SIMILARITY)
                hint = f" (did you mean {meant!r}?)" if meant else ""
                schema.raise_unsupported(keyword, f"is not enforced{hint}; leave it out, and check for it yourself")
        compiled = self._any_type(schema)
        types = compiled.get("type", TYPES)
        allowed = {types} if isinstance(types, str) else set(types)
        if "string" in allowed:
            string = compile_string(schema)
            second_pattern = string.pop("allOf", [])  # of a string with a pattern and a format
            compiled |= string
            if second_pattern:
                compiled["allOf"] = compiled.get("allOf", []) + second_pattern
        if allowed & {"number", "integer"}:
            compiled |= compile_number(schema, is_integer="number" not in allowed)
        if "object" in allowed:
            compiled |= self._object(schema)
        if "array" in allowed:
            compiled |= self._array(schema)
        self._record_needs(schema, compiled, allowed)
        return compiled

    def _any_type(self, schema: Subschema) -> Schema:
        """Compile the keywords that apply to values of any type."""
        keywords, compiled = schema.keywords, dict[str, Any]()
        if "type" in keywords:
            listed: list[Any] = keywords["type"] if isinstance(keywords["type"], list) else [keywords["type"]]
            if not listed or any(name not in TYPES for name in listed):
                schema.raise_invalid("type", f"one of {', '.join(TYPES)}, or a list of these", keywords["type"])
            compiled["type"] = keywords["type"]
        for keyword in ("enum", "const"):
            if keyword not in keywords:
                continue
            if keyword == "enum" and (not isinstance(keywords["enum"], list) or not keywords["enum"]):
                schema.raise_invalid("enum", "a list of values", keywords["enum"])
            # beside other keywords, some constants might not be valid
            if others := (keywords.keys() & _ENFORCED) - {keyword, "type"}:
                schema.raise_unsupported(keyword, f"is not enforced together with {min(others)!r}")
            self.constants.append((schema, keyword))
            compiled[keyword] = keywords[keyword]
        if "$ref" in keywords:
            compiled["$ref"] = self._reference(schema)
        for keyword in ("anyOf", "allOf"):
            if keyword in keywords:
                compiled[keyword] = self._list(schema, keyword)
        if "oneOf" in keywords:
            if "anyOf" in keywords:
                schema.raise_unsupported("oneOf", "is not enforced together with 'anyOf'")
            compiled["anyOf"] = exclusive(schema, self._list(schema, "oneOf"), self._resolve)
        return compiled

    def _list(self, schema: Subschema, keyword: str) -> list[Any]:
        """Compile a keyword whose value is a list of schemas."""
        value = schema.keywords[keyword]
        if not isinstance(value, list) or not value:
            schema.raise_invalid(keyword, "a list of schemas", value)
        schemas = cast("list[object]", value)
        limit = MAX_ALL_OF if keyword == "allOf" else MAX_BRANCHES
        if len(schemas) > limit:
            schema.raise_unsupported(keyword, f"has more than {limit} entries")
        return [self._schema(entry, schema.at(keyword, i), schema.depth + 1) for i, entry in enumerate(schemas)]

    # ------------------------------------------------------------ references

    def _reference(self, schema: Subschema) -> str:
        reference = schema.keywords["$ref"]
        if not isinstance(reference, str):
            schema.raise_invalid("$ref", "a string", reference)
        if reference != "#" and not reference.startswith("#/"):
            schema.raise_unsupported("$ref", f"{reference[:80]!r} is not a reference into this schema")
        if reference not in self._names:
            self._target(reference, schema)  # raises if there is no such schema
            self._users[reference] = schema
            self._names[reference] = f"d{len(self._names)}"
            self._waiting.append(reference)
        return f"#/$defs/{self._names[reference]}"

    def _target(self, reference: str, user: Subschema) -> object:
        """Return the target of a reference in the schema ``user``."""
        target = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = cast("Schema", target)[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(cast("list[object]", target)):
                target = cast("list[object]", target)[int(key)]
            else:
                user.raise_invalid("$ref", "a reference to something in this schema", reference)
        return target

    def _record_needs(self, schema: Subschema, compiled: Schema, types: set[str]) -> None:
        """Record which other schemas a value of this schema needs. types: the types that it allows.

        The pointer of a schema is a rule with an alternative for each type. If the schema has ``anyOf`` or ``oneOf``,
        the pointer of ``anyOf`` is a rule with an alternative for each branch.
        """

        def listed(keyword: str) -> list[str]:
            return [schema.at(keyword, i) for i in range(len(schema.keywords.get(keyword, ())))]

        same = ([schema.keywords["$ref"][1:]] if "$ref" in compiled else []) + listed("allOf")
        branches = listed("anyOf") + listed("oneOf")
        self._same_value[schema.pointer] = same + branches
        needed = list(same)  # by a value of any type
        if branches:
            needed.append(schema.at("anyOf"))
            self._alternatives[schema.at("anyOf")] = [[branch] for branch in branches]
        properties = [
            schema.at("properties", name)
            if name in schema.keywords.get("properties", ())
            else schema.at("additionalProperties")
            for name in compiled.get("required", ())
        ]
        items = listed("prefixItems") if "prefixItems" in compiled else []
        parts = {"object": properties, "array": [*items, schema.at("items")][: compiled.get("minItems", 0)]}
        self._alternatives[schema.pointer] = [needed + parts.get(name, []) for name in types]

    def _check_recursion(self) -> None:
        """Refuse a schema that refers to itself for the same value, or whose values must contain others of its values.

        The rules are those of ``_record_needs``, named by JSON pointer.
        """
        try:
            TopologicalSorter(self._same_value).prepare()
        except CycleError as error:
            reference = next(ref for ref in self._names if ref[1:] in error.args[1])
            self._users[reference].raise_unsupported("$ref", f"{reference[:80]!r} refers to itself")
        endless = endless_rule(self._alternatives, "")
        if endless is not None:
            reason = "can never end, because each value must contain another one; make a property or an item optional"
            self._users[f"#{endless}"].raise_unsupported("$ref", f"{f'#{endless}'[:80]!r} {reason}")

    def _resolve(self, schema: object) -> Schema:
        """Return the target of a schema that is only a reference, or the schema itself.

        Return {} for a boolean, and after too many references.
        """
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            keywords = cast("Schema", schema)
            if keywords.keys() - _ANNOTATIONS != {"$ref"}:
                return keywords
            schema = self._target(keywords["$ref"], Subschema(keywords, "", 0))
        return {}

    # ------------------------------------------------------------ objects and arrays

    def _object(self, schema: Subschema) -> Schema:
        value = schema.keywords.get("required", [])
        if not isinstance(value, list) or any(not isinstance(name, str) for name in cast("list[object]", value)):
            schema.raise_invalid("required", "a list of names", value)
        required = list(dict.fromkeys(cast("list[str]", value)))
        compiled: Schema = {}
        properties = self._by_name(schema, "properties")
        others: Any = True
        if "additionalProperties" in schema.keywords:
            pointer = schema.at("additionalProperties")
            others = self._schema(schema.keywords["additionalProperties"], pointer, schema.depth + 1)
            compiled["additionalProperties"] = others
        if patterns := self._pattern_properties(schema):
            compiled["patternProperties"] = patterns
        for name in required:
            if others is False and name not in properties:
                schema.raise_unsupported("required", f"names {name[:80]!r}, which additionalProperties rules out")
        properties |= {name: others for name in required if name not in properties}
        if len(properties) - len(required) > MAX_OPTIONAL:
            schema.raise_unsupported("properties", f"has more than {MAX_OPTIONAL} optional ones")
        if properties:
            compiled["properties"] = properties
        if required:
            compiled["required"] = required
        return compiled | _compile_property_counts(schema, compiled)

    def _by_name(self, schema: Subschema, keyword: str) -> Schema:
        """Compile a keyword that has a schema for each name."""
        schemas = schema.keywords.get(keyword, {})
        if not isinstance(schemas, dict):
            schema.raise_invalid(keyword, "an object", schemas)
        return {
            name: self._schema(value, schema.at(keyword, name), schema.depth + 1)
            for name, value in cast("Schema", schemas).items()
        }

    def _pattern_properties(self, schema: Subschema) -> Schema:
        """Compile ``patternProperties``.

        They are not enforced together with ``properties``, because one name could match both.
        """
        compiled = self._by_name(schema, "patternProperties")
        for pattern in compiled:
            self._budget.take_pattern(schema, "patternProperties", pattern)
        if compiled and schema.keywords.get("additionalProperties") is not False:
            schema.raise_unsupported("patternProperties", 'is enforced only with "additionalProperties": false')
        if compiled and (schema.keywords.get("properties") or schema.keywords.get("required")):
            schema.raise_unsupported("patternProperties", "is not enforced together with 'properties' or 'required'")
        return {
            compile_pattern(pattern, schema.at("patternProperties", pattern)): result
            for pattern, result in compiled.items()
        }

    def _array(self, schema: Subschema) -> Schema:
        keywords = schema.keywords
        compiled: Schema = compile_counts(schema, "minItems", "maxItems")
        if "items" in keywords:
            if isinstance(keywords["items"], list):
                schema.raise_unsupported("items", "is a list, as in older JSON schemas; write 'prefixItems'")
            compiled["items"] = self._schema(keywords["items"], schema.at("items"), schema.depth + 1)
        if "prefixItems" in keywords:
            compiled["prefixItems"] = self._list(schema, "prefixItems")
        return compiled


def _compile_property_counts(schema: Subschema, compiled: Schema) -> Schema:
    """Compile ``minProperties`` and ``maxProperties``. compiled: the other keywords of the object.

    They are enforced if all properties are listed: an unlisted property could be generated twice. llguidance
    counts at most one optional property.
    """
    limits = compile_counts(schema, "minProperties", "maxProperties")
    num_required, num_listed = len(compiled.get("required", ())), len(compiled.get("properties", ()))
    if "minProperties" in limits and limits["minProperties"] <= num_required:
        del limits["minProperties"]
    is_closed = compiled.get("additionalProperties") is False and "patternProperties" not in compiled
    if limits and not is_closed:
        schema.raise_unsupported(next(iter(limits)), 'is enforced only with "additionalProperties": false')
    if "maxProperties" in limits and limits["maxProperties"] >= num_listed:
        del limits["maxProperties"]
    for keyword, limit in limits.items():
        required = counted(num_required, "required property", "required properties")
        if not num_required <= limit <= num_listed:
            schema.raise_unsupported(keyword, f"is {limit}; with {required} of {num_listed}, no value is valid")
        if limit != num_required + 1:
            schema.raise_unsupported(keyword, f"is {limit}; with {required}, only {num_required + 1} can be enforced")
    return limits
