"""``oneOf``: enforced as ``anyOf``, where no value can fit two of its branches; else refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.constraints.schema_values import Schema, Subschema

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def exclusive(place: Subschema, made: list[Any], follow: Callable[[object], Schema]) -> list[Any]:
    """The branches of the oneOf at ``place``, changed so that no value fits two of them.

    made: the compiled branches. follow: what a schema that is but a reference refers to.

    Raises:
        UnsupportedSchemaError: two branches may both fit a value, as far as types and constants show.
    """
    plain = [follow(each) for each in place.given["oneOf"]]
    kinds = [_kinds(each) for each in plain]
    if all(not (mine & other) for position, mine in enumerate(kinds) for other in kinds[:position]):
        return made
    if _are_apart([_constants(each) for each in plain]):
        return made
    if all(each.get("type") == "object" for each in plain):
        properties = [cast("Schema", each.get("properties") or {}) for each in plain]
        for name in properties[0]:
            if _are_apart([_constants(follow(each.get(name, True))) for each in properties]):
                present = {"type": "object", "required": [name]}
                return [
                    each if name in of.get("required", ()) else {"allOf": [each, present]}
                    for each, of in zip(made, plain, strict=True)
                ]
    place.refuse(
        "oneOf",
        "has branches that may both fit; give each another type, or a property with other constants in each, or write "
        "anyOf",
    )


def _kinds(schema: Schema) -> set[str]:
    """The types of the values that a schema may allow; an integer is a number."""
    types = schema.get("type", TYPES)
    return {"number" if each == "integer" else each for each in ([types] if isinstance(types, str) else types)}


def _constants(schema: Schema) -> Sequence[object] | None:
    """The only values that a schema allows; None: others, too."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _are_apart(constants: Sequence[Sequence[object] | None]) -> bool:
    """Whether no two of these lists share a constant. Only strings count: equal numbers can be written differently."""
    sets: list[set[str]] = []
    for values in constants:
        if values is None or any(not isinstance(value, str) for value in values):
            return False
        sets.append(set(cast("Sequence[str]", values)))
    return sum(map(len, sets)) == len(set[str]().union(*sets))
