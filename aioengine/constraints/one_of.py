"""``oneOf``: enforced like ``anyOf`` if no value can match two branches; otherwise refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aioengine.constraints.schema_values import Schema, Subschema

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
