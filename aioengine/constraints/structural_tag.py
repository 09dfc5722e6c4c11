"""``structural_tag``: text with constrained parts, as a grammar in llguidance's dialect of Lark.

A tag has one of two forms. The legacy form is ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``: free
text in which a trigger starts one of the structures. The other form is ``{"format": ...}``, a tree of formats. The
types of formats and their options are in ``_OPTIONS``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn, cast

from aioengine.api.checks import did_you_mean, shown
from aioengine.constraints.json_schema import Budget, compile_schema
from aioengine.constraints.python_regex import translate
from aioengine.constraints.schema_values import Subschema
from aioengine.constraints.tag_grammar import (
    FreeText,
    Literal,
    Part,
    Rule,
    TagGrammar,
    Terminal,
    Token,
    either,
    raise_unsupported,
)
from aioengine.errors import UnsupportedSchemaError

MAX_BYTES: Final = 262_144
MAX_DEPTH: Final = 16
MAX_STRINGS: Final = 32
"""Maximum strings in each list of triggers, excludes or ends."""
MAX_COUNT: Final = 1000
"""Maximum of ``repeat`` and ``max_chars``."""

_OPTIONS: Final = {
    "const_string": ("value",),
    "token": ("token",),
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
"""Values that make an option without effect, so that it is ignored if the format does not have it."""

Format = dict[str, Any]


def lark_of(text: str, *, whitespace: dict[str, object]) -> str:
    """Return the grammar of a structural tag, given as JSON text. whitespace: options of its JSON parts.

    Raises:
        ValueError: it is not a structural tag.
        UnsupportedSchemaError: a part of it cannot be enforced.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    try:
        tag = _object(json.loads(text), "")
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    grammar = TagGrammar()
    reader = _TagReader(grammar, whitespace)
    if "format" in tag:
        parts = reader.read(tag["format"], "/format", 0)
    elif "structures" not in tag:
        keys = ", ".join(map(shown, sorted(tag)[:5])) or "nothing"
        raise ValueError(f'it has no "format": put it there, as {{"format": {{"type": ...}}}}; it has {keys}')
    else:
        structures: list[tuple[Any, str]] = []
        for entry, pointer in _list(tag, "structures", ""):
            content = {"type": "json_schema", "json_schema": _object(entry, pointer).get("schema")}
            structures.append(({**entry, "schema": None, "content": content}, pointer))
        parts = reader.triggered(tag, structures, "", 0)
    start = grammar.write(parts, "/format").name
    return "\n".join(["%llguidance {}", f"start: {start}", *grammar.lines])


class _TagReader:
    """Converts the tree of formats to parts, and checks each of them."""

    def __init__(self, grammar: TagGrammar, whitespace: dict[str, object]) -> None:
        self._grammar = grammar
        self._whitespace = whitespace
        self._budget = Budget()

    def read(self, value: object, pointer: str, depth: int) -> list[Part]:
        """Return the parts of a format, in sequence. depth: the number of formats around it."""
        node = _object(value, pointer)
        kind = _string(node, "type", pointer)
        if kind not in _OPTIONS:
            raise_unsupported(f"{pointer}/type", kind, f"is not known; allowed: {', '.join(_OPTIONS)}")
        if depth > MAX_DEPTH:
            raise_unsupported(pointer, kind, f"is nested more than {MAX_DEPTH} deep")
        _check_options(node, kind, pointer)
        schema = Subschema(node, pointer, depth)
        self._budget.take_schema(schema)
        match kind:
            case "const_string":
                return [Literal([_string(node, "value", pointer)])]
            case "token":
                return [Token(_string(node, "token", pointer))]
            case "json_schema":
                return [self._json(node.get("json_schema"), f"{pointer}/json_schema")]
            case "regex":
                pattern = _string(node, "pattern", pointer)
                self._budget.take_pattern(schema, "pattern", pattern)
                expression = translate(pattern, pointer=f"{pointer}/pattern").replace("/", r"\/")
                return [Terminal(f"/{expression}/", pointer)]
            case "any_text":
                max_chars = None if node.get("max_chars") is None else _count(node, "max_chars", pointer, 0)
                return [FreeText(pointer, _excludes(node, pointer), {}, max_chars=max_chars)]
            case "sequence":
                elements = _list(node, "elements", pointer)
                return [part for element, at in elements for part in self.read(element, at, depth + 1)]
            case "or":
                elements = _list(node, "elements", pointer)
                return [either([self.read(element, at, depth + 1) for element, at in elements], pointer)]
            case "tag":
                return [Literal([_string(node, "begin", pointer)]), *self._after_begin(node, pointer, depth)]
            case "triggered_tags":
                return self.triggered(node, _list(node, "tags", pointer), pointer, depth)
            case "tags_with_separator":
                return self._separated(node, pointer, depth)
            case "dispatch":
                return [self._dispatch(node, pointer, depth)]
            case _:
                return [self._repeated(kind, node, pointer, depth)]

    def _json(self, schema: object, pointer: str) -> Rule:
        try:
            compiled = compile_schema(json.dumps(schema), self._budget)
        except UnsupportedSchemaError as error:
            message = f"in the schema at {pointer}, {error}"
            raise UnsupportedSchemaError(message, pointer=pointer + error.pointer, keyword=error.keyword) from None
        except ValueError as error:
            raise ValueError(f"in the schema at {pointer}, {error}") from None
        types = compiled.get("type", ["number"])
        is_number = bool({"number", "integer"} & {*([types] if isinstance(types, str) else types)})
        text = json.dumps({**compiled, "x-guidance": self._whitespace})
        return Rule(self._grammar.rule(f"%json {text}"), pointer, is_number=is_number)

    def _repeated(self, kind: str, node: Format, pointer: str, depth: int) -> Part:
        parts = self.read(node.get("content"), f"{pointer}/content", depth + 1)
        if kind == "optional":
            return either([parts, []], pointer)
        min_count, max_count = (1 if kind == "plus" else 0), -1
        if kind == "repeat":
            min_count, max_count = _count(node, "min", pointer, 0), _count(node, "max", pointer, -1)
            if max_count != -1 and max_count < min_count:
                _raise_wrong(f"{pointer}/max", f"-1 or from 'min' ({min_count}) on", max_count)
            if max_count == 0:
                return Literal([""])
        return self._grammar.repeated(parts, pointer, min_count, None if max_count == -1 else max_count)

    def _after_begin(self, tag: Format, pointer: str, depth: int) -> list[Part]:
        """Return the content and the end of a tag."""
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else _strings(end, f"{pointer}/end")
        return [*self.read(tag.get("content"), f"{pointer}/content", depth + 1), Literal(ends)]

    def _tags(self, entries: list[tuple[Any, str]], depth: int) -> list[tuple[str, Rule]]:
        """Return for each tag its beginning, and the rule for the text after it. entries: (tag, pointer)."""
        tags: list[tuple[str, Rule]] = []
        for value, pointer in entries:
            tag = _object(value, pointer)
            if tag.get("type", "tag") != "tag":
                _raise_wrong(f"{pointer}/type", "'tag'", tag["type"])
            _check_options(tag, "tag", pointer)
            begin = _string(tag, "begin", pointer)
            tags.append((begin, self._grammar.write(self._after_begin(tag, pointer, depth + 1), pointer)))
        return tags

    def triggered(self, node: Format, entries: list[tuple[Any, str]], pointer: str, depth: int) -> list[Part]:
        """Return free text in which a trigger starts one of the tags that begin with it. entries: (tag, pointer)."""
        triggers = _strings(node.get("triggers"), f"{pointer}/triggers")
        tags = self._tags(entries, depth)
        rules: dict[str, list[Rule]] = {}
        for begin, rule in tags:
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                _raise_wrong(f"{rule.pointer}/begin", "a text that starts with one of the triggers", begin)
            rest = self._grammar.write([Literal([begin.removeprefix(trigger)]), rule], rule.pointer)
            rules.setdefault(trigger, []).append(rest)
        loops = not _flag(node, "stop_after_first", pointer)
        free = FreeText(pointer, _excludes(node, pointer), rules, loops=loops)
        if not _flag(node, "at_least_one", pointer):
            return [free]
        return [_one_of(tags, pointer), *([free] if loops else [])]

    def _separated(self, node: Format, pointer: str, depth: int) -> list[Part]:
        separator = Literal([_string(node, "separator", pointer)])
        tag = _one_of(self._tags(_list(node, "tags", pointer), depth), pointer)
        parts: list[Part] = [tag]
        if not _flag(node, "stop_after_first", pointer):
            parts.insert(0, self._grammar.repeated([tag, separator], pointer, 0, None))
        return parts if _flag(node, "at_least_one", pointer) else [either([parts, []], pointer)]

    def _dispatch(self, node: Format, pointer: str, depth: int) -> Part:
        rules: dict[str, list[Rule]] = {}
        for value, at in _list(node, "rules", pointer):
            if not isinstance(value, list) or len(cast("list[object]", value)) != 2:
                _raise_wrong(at, "a list of a text and a format", value)
            begin, content = cast("list[object]", value)
            rule = self._grammar.write(self.read(content, f"{at}/1", depth + 1), f"{at}/1")
            rules.setdefault(_strings([begin], at)[0], []).append(rule)
        _strings(list(rules), f"{pointer}/rules")
        return FreeText(pointer, _excludes(node, pointer), rules, loops=_flag(node, "loop", pointer, default=True))


def _one_of(tags: list[tuple[str, Rule]], pointer: str) -> Part:
    return either([[Literal([begin]), rule] for begin, rule in tags], pointer)


# ---------------------------------------------------------------- values of options


def _raise_wrong(pointer: str, allowed: str, value: object) -> NoReturn:
    raise ValueError(f"{pointer or 'it'} must be {allowed}, got {shown(value)}")


def _check_options(node: Format, kind: str, pointer: str) -> None:
    for key in sorted(node.keys() - {"type", *_OPTIONS[kind]}):
        if node[key] not in _UNSET:
            hint = did_you_mean(key, _OPTIONS[kind])
            raise_unsupported(f"{pointer}/{key}", key, f"is not enforced{hint}; leave it out")


def _object(value: object, pointer: str) -> Format:
    if not isinstance(value, dict):
        _raise_wrong(pointer, "an object", value)
    return cast("Format", value)


def _string(node: Format, key: str, pointer: str) -> str:
    value = node.get(key)
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        _raise_wrong(f"{pointer}/{key}", "a string", value)
    return value


def _strings(value: object, pointer: str) -> list[str]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    if not entries or len(entries) > MAX_STRINGS or "" in entries:
        _raise_wrong(pointer, f"a list of 1 to {MAX_STRINGS} strings that are not empty", value)
    return [_string({str(i): entry}, str(i), pointer) for i, entry in enumerate(entries)]


def _excludes(node: Format, pointer: str) -> list[str]:
    value = node.get("excludes")
    return [] if value in (None, []) else _strings(value, f"{pointer}/excludes")


def _list(node: Format, key: str, pointer: str) -> list[tuple[Any, str]]:
    """Return the entries of a list, each with its pointer."""
    value = node.get(key)
    if not isinstance(value, list) or not value:
        _raise_wrong(f"{pointer}/{key}", "a list with entries", value)
    return [(entry, f"{pointer}/{key}/{i}") for i, entry in enumerate(cast("Sequence[Any]", value))]


def _flag(node: Format, key: str, pointer: str, *, default: bool = False) -> bool:
    value = node.get(key, default)
    if not isinstance(value, bool):
        _raise_wrong(f"{pointer}/{key}", "true or false", value)
    return value


def _count(node: Format, key: str, pointer: str, minimum: int) -> int:
    value = node.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        _raise_wrong(f"{pointer}/{key}", f"an integer from {minimum}", value)
    if value > MAX_COUNT:
        raise_unsupported(f"{pointer}/{key}", key, f"is {value:,}; at most {MAX_COUNT:,} is enforced")
    return value
