"""``structural_tag``: text with constrained parts, as a grammar in llguidance's dialect of Lark.

Two forms: the older one, ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, free text in which a
trigger begins one of the structures; and the present one, ``{"format": ...}``, a tree of the types in ``_OPTIONS``.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn, cast

from aioengine.api.checks import did_you_mean, shown
from aioengine.constraints.json_schema import Budget, compile_schema
from aioengine.constraints.python_regex import translate
from aioengine.constraints.schema_values import Subschema
from aioengine.constraints.tag_grammar import FreeText, Literal, Part, Rule, TagGrammar, Terminal, either, refuse
from aioengine.errors import UnsupportedSchemaError

MAX_BYTES: Final = 262_144
MAX_DEPTH: Final = 16
MAX_STRINGS: Final = 32
"""In each list of triggers, of excludes, and of ends."""
MAX_COUNT: Final = 1000
"""Of ``repeat`` and ``max_chars``."""

_OPTIONS: Final = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": ("excludes", "max_chars"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
}
_UNSET: Final[tuple[object, ...]] = (None, False, "json", [])
"""Values of other options with which they ask for nothing."""


def lark_of(value: object, *, whitespace: dict[str, object]) -> str:
    """The grammar of a structural tag: its JSON text, or a dict. ``whitespace``: options of the JSON parts.

    Raises:
        ValueError: it is no structural tag.
        UnsupportedSchemaError: a part of it cannot be enforced; with ``pointer`` and ``keyword``.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"it is no JSON text: {error}"
        raise ValueError(message) from None
    grammar = TagGrammar()
    reader = _Reader(grammar, whitespace)
    tag = _object(given, "")
    if "format" in tag:
        parts = reader.read(tag["format"], "/format", 0)
    elif "structures" not in tag:
        keys = ", ".join(map(shown, sorted(tag)[:5])) or "nothing"
        message = f'it has no "format": put the format under it, as {{"format": {{"type": ...}}}}; it has {keys}'
        raise ValueError(message)
    else:
        parts = reader.triggered(tag, _structures(tag), "", 0)
    start = grammar.write(parts, "/format").name
    return "\n".join(["%llguidance {}", f"start: {start}", *grammar.lines])


def _structures(tag: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Those of the older form, as tags, each with its pointer."""
    return [
        (
            {
                **_object(each, at),
                "schema": None,
                "content": {"type": "json_schema", "json_schema": each.get("schema")},
            },
            at,
        )
        for each, at in _list(tag, "structures", "")
    ]


class _Reader:
    """From the tree to parts, each of which is checked."""

    def __init__(self, grammar: TagGrammar, whitespace: dict[str, object]) -> None:
        self._grammar = grammar
        self._whitespace = whitespace
        self._budget = Budget()

    def read(self, value: object, pointer: str, depth: int) -> list[Part]:
        """The parts of a format, one behind the other."""
        given = _object(value, pointer)
        kind = _string(given, "type", pointer)
        if kind not in _OPTIONS:
            refuse(f"{pointer}/type", kind, f"is not known; known are {', '.join(_OPTIONS)}")
        if depth > MAX_DEPTH:
            refuse(pointer, kind, f"is nested more than {MAX_DEPTH} deep")
        _check_options(given, kind, pointer)
        self._budget.take_schema(Subschema(given, pointer, depth))
        if kind in ("const_string", "json_schema", "regex", "any_text"):
            return [self._leaf(kind, given, pointer, depth)]
        if kind == "sequence":
            return [part for each, at in _list(given, "elements", pointer) for part in self.read(each, at, depth + 1)]
        if kind == "or":
            elements = _list(given, "elements", pointer)
            return [either([self.read(each, at, depth + 1) for each, at in elements], pointer)]
        if kind == "tag":
            return [Literal([_string(given, "begin", pointer)]), *self._behind_begin(given, pointer, depth)]
        if kind == "triggered_tags":
            return self.triggered(given, _list(given, "tags", pointer), pointer, depth)
        if kind == "tags_with_separator":
            return self._separated(given, pointer, depth)
        if kind == "dispatch":
            return [self._dispatch(given, pointer, depth)]
        return [self._repeated(kind, given, pointer, depth)]

    def _leaf(self, kind: str, given: dict[str, Any], pointer: str, depth: int) -> Part:
        if kind == "const_string":
            return Literal([_string(given, "value", pointer)])
        if kind == "json_schema":
            return self._json(given.get("json_schema"), f"{pointer}/json_schema")
        if kind == "regex":
            pattern = _string(given, "pattern", pointer)
            self._budget.take_pattern(Subschema(given, pointer, depth), pattern)
            text = translate(pattern, pointer=f"{pointer}/pattern")
            return Terminal("/" + text.replace("/", r"\/") + "/", pointer)
        most = None if given.get("max_chars") is None else _count(given, "max_chars", pointer, 0)
        return FreeText(pointer, _excludes(given, pointer), {}, max_chars=most)

    def _json(self, schema: object, pointer: str) -> Rule:
        try:
            made = compile_schema(json.dumps(schema), self._budget)
        except UnsupportedSchemaError as error:
            message = f"in the schema at {pointer}, {error}"
            raise UnsupportedSchemaError(message, pointer=pointer + error.pointer, keyword=error.keyword) from None
        except ValueError as error:
            raise ValueError(f"in the schema at {pointer}, {error}") from None
        types = made.get("type", ["number"])
        is_number = bool({"number", "integer"} & {*([types] if isinstance(types, str) else types)})
        text = json.dumps({**made, "x-guidance": self._whitespace})
        return Rule(self._grammar.rule(f"%json {text}"), pointer, is_number=is_number)

    def _repeated(self, kind: str, given: dict[str, Any], pointer: str, depth: int) -> Part:
        parts = self.read(given.get("content"), f"{pointer}/content", depth + 1)
        if kind == "optional":
            return either([parts, []], pointer)
        least, most = (1 if kind == "plus" else 0), None
        if kind == "repeat":
            least, most = _count(given, "min", pointer, 0), _count(given, "max", pointer, -1)
            if most != -1 and most < least:
                _wrong(f"{pointer}/max", f"-1 or from 'min' ({least}) on", most)
            if most == 0:
                return Literal([""])
            most = None if most == -1 else most
        return self._grammar.repeated(parts, pointer, least, most)

    def _behind_begin(self, given: dict[str, Any], pointer: str, depth: int) -> list[Part]:
        """What a tag has behind its beginning."""
        end = given.get("end")
        ends = [end] if isinstance(end, str) else _strings(end, f"{pointer}/end")
        return [*self.read(given.get("content"), f"{pointer}/content", depth + 1), Literal(ends)]

    def _tags(self, listed: list[tuple[Any, str]], depth: int) -> list[tuple[str, Rule]]:
        """The beginning of each, and the rule of what stands behind it."""
        tags = list[tuple[str, Rule]]()
        for value, pointer in listed:
            tag = _object(value, pointer)
            if tag.get("type", "tag") != "tag":
                _wrong(f"{pointer}/type", "'tag'", tag["type"])
            _check_options(tag, "tag", pointer)
            begin = _string(tag, "begin", pointer)
            tags.append((begin, self._grammar.write(self._behind_begin(tag, pointer, depth + 1), pointer)))
        return tags

    def triggered(self, given: dict[str, Any], listed: list[tuple[Any, str]], pointer: str, depth: int) -> list[Part]:
        """Free text, in which a trigger begins one of the tags that start with it. ``listed``: the tags."""
        triggers = _strings(given.get("triggers"), f"{pointer}/triggers")
        tags = self._tags(listed, depth)
        found: dict[str, list[Rule]] = {}
        for begin, rule in tags:
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                _wrong(f"{rule.pointer}/begin", "a text that starts with one of the triggers", begin)
            rest = self._grammar.write([Literal([begin.removeprefix(trigger)]), rule], rule.pointer)
            found.setdefault(trigger, []).append(rest)
        loops = not _flag(given, "stop_after_first", pointer)
        free = FreeText(pointer, _excludes(given, pointer), found, loops=loops)
        if not _flag(given, "at_least_one", pointer):
            return [free]
        return [_one_of(tags, pointer), *([free] if loops else [])]

    def _separated(self, given: dict[str, Any], pointer: str, depth: int) -> list[Part]:
        separator = Literal([_string(given, "separator", pointer)])
        tag = _one_of(self._tags(_list(given, "tags", pointer), depth), pointer)
        parts: list[Part] = [tag]
        if not _flag(given, "stop_after_first", pointer):
            parts.insert(0, self._grammar.repeated([tag, separator], pointer, 0, None))
        return parts if _flag(given, "at_least_one", pointer) else [either([parts, []], pointer)]

    def _dispatch(self, given: dict[str, Any], pointer: str, depth: int) -> Part:
        found: dict[str, list[Rule]] = {}
        for value, at in _list(given, "rules", pointer):
            if not isinstance(value, list) or len(cast("list[object]", value)) != 2:
                _wrong(at, "a list of a text and a format", value)
            begin, content = cast("list[object]", value)
            rule = self._grammar.write(self.read(content, f"{at}/1", depth + 1), f"{at}/1")
            found.setdefault(_strings([begin], at)[0], []).append(rule)
        _strings(list(found), f"{pointer}/rules")
        return FreeText(pointer, _excludes(given, pointer), found, loops=_flag(given, "loop", pointer, default=True))


def _one_of(tags: list[tuple[str, Rule]], pointer: str) -> Part:
    return either([[Literal([begin]), rule] for begin, rule in tags], pointer)


# ---------------------------------------------------------------- values of options


def _wrong(pointer: str, allowed: str, value: object) -> NoReturn:
    message = f"{pointer or 'it'} must be {allowed}, got {shown(value)}"
    raise ValueError(message)


def _check_options(given: dict[str, Any], kind: str, pointer: str) -> None:
    for key in sorted(given.keys() - {"type", *_OPTIONS[kind]}):
        if given[key] not in _UNSET:
            hint = did_you_mean(key, _OPTIONS[kind])
            refuse(f"{pointer}/{key}", key, f"is not enforced{hint}; leave it out")


def _object(value: object, pointer: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(pointer, "an object", value)
    return cast("dict[str, Any]", value)


def _string(of: dict[str, Any], key: str, pointer: str) -> str:
    value = of.get(key)
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        _wrong(f"{pointer}/{key}", "a string", value)
    return value


def _strings(value: object, pointer: str) -> list[str]:
    listed = cast("list[object]", value) if isinstance(value, list) else []
    if not listed or len(listed) > MAX_STRINGS or "" in listed:
        _wrong(pointer, f"a list of 1 to {MAX_STRINGS} strings that are not empty", value)
    return [_string({str(place): each}, str(place), pointer) for place, each in enumerate(listed)]


def _excludes(given: dict[str, Any], pointer: str) -> list[str]:
    value = given.get("excludes")
    return [] if value in (None, []) else _strings(value, f"{pointer}/excludes")


def _list(of: dict[str, Any], key: str, pointer: str) -> list[tuple[Any, str]]:
    """The entries of a list, each with its pointer."""
    value = of.get(key)
    if not isinstance(value, list) or not value:
        _wrong(f"{pointer}/{key}", "a list with entries", value)
    entries: list[Any] = value
    return [(each, f"{pointer}/{key}/{place}") for place, each in enumerate(entries)]


def _flag(of: dict[str, Any], key: str, pointer: str, *, default: bool = False) -> bool:
    value = of.get(key, default)
    if not isinstance(value, bool):
        _wrong(f"{pointer}/{key}", "true or false", value)
    return value


def _count(of: dict[str, Any], key: str, pointer: str, least: int) -> int:
    value = of.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _wrong(f"{pointer}/{key}", f"a whole number from {least} on", value)
    if value > MAX_COUNT:
        refuse(f"{pointer}/{key}", key, f"is {value:,}; at most {MAX_COUNT:,} is enforced")
    return value
