"""``structural_tag``: text with constrained parts, as a grammar in llguidance's dialect of Lark.

Two forms: the older one, ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, free text in which a
trigger begins one of the structures; and the present one, ``{"format": ...}``, a tree of ``const_string``,
``json_schema``, ``regex``, ``any_text``, ``sequence``, ``or``, ``tag`` and ``triggered_tags``.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn, cast

from aioengine.constraints.json_schema import Budget, compiled
from aioengine.constraints.python_regex import translate
from aioengine.constraints.schema_values import Place
from aioengine.errors import UnsupportedSchemaError

MAX_BYTES: Final = 262_144
MAX_DEPTH: Final = 16
MAX_TRIGGERS: Final = 32
_ANY_TEXT: Final = "/(?s:.*)/"


def lark_of(value: object, *, whitespace: dict[str, object]) -> str:
    """The grammar of a structural tag: its JSON text, or a dict. ``whitespace``: options of the JSON parts.

    Raises:
        ValueError: it is no structural tag.
        UnsupportedSchemaError: a part of it cannot be enforced; with ``pointer`` and ``keyword``.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_BYTES:
        _wrong("", f"at most {MAX_BYTES:,} characters", f"{len(text):,}")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"structural_tag is no JSON text: {error}"
        raise ValueError(message) from None
    return _Grammar(whitespace).write(given)


def _wrong(pointer: str, allowed: str, value: object) -> NoReturn:
    message = f"structural_tag{pointer and ' at '}{pointer} must be {allowed}, got {repr(value)[:80]}"
    raise ValueError(message)


class _Grammar:
    """Rules are named by numbers; each part of the tree becomes one, so that the text grows with the tag alone."""

    def __init__(self, whitespace: dict[str, object]) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._budget = Budget()

    def write(self, given: object) -> str:
        tag = self._object(given, "")
        if "format" in tag:
            start = self._format(tag["format"], "/format", 0)
        else:
            start = self._triggered(tag, tag.get("structures"), "/structures", 0, schema_key="schema")
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _object(self, value: object, pointer: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            _wrong(pointer, "an object", value)
        return cast("dict[str, Any]", value)

    def _string(self, of: dict[str, Any], key: str, pointer: str) -> str:
        value = of.get(key)
        if not isinstance(value, str):
            _wrong(f"{pointer}/{key}", "a string", value)
        return value

    def _list(self, of: dict[str, Any], key: str, pointer: str) -> list[Any]:
        value = of.get(key)
        if not isinstance(value, list) or not value:
            _wrong(f"{pointer}/{key}", "a list with entries", value)
        return list(value)

    def _format(self, value: object, pointer: str, depth: int) -> str:
        """The name of the rule for this part."""
        given = self._object(value, pointer)
        kind = self._string(given, "type", pointer)
        if depth > MAX_DEPTH:
            self._refuse(pointer, kind, f"is nested more than {MAX_DEPTH} deep")
        self._budget.take_schema(Place(given, pointer, depth))
        if kind == "const_string":
            return self._rule(_literal(self._string(given, "value", pointer)))
        if kind == "json_schema":
            return self._json(given.get("json_schema"), f"{pointer}/json_schema")
        if kind == "regex":
            pattern = self._string(given, "pattern", pointer)
            self._budget.take_patterns(Place(given, pointer, depth), [pattern])
            return self._rule(_regex(translate(pattern, pointer=f"{pointer}/pattern")))
        if kind == "any_text":
            return self._rule(_ANY_TEXT)
        if kind in ("sequence", "or"):
            parts = [
                self._format(each, f"{pointer}/elements/{place}", depth + 1)
                for place, each in enumerate(self._list(given, "elements", pointer))
            ]
            return self._rule((" " if kind == "sequence" else " | ").join(parts))
        if kind == "tag":
            return self._rule(self._tag(given, pointer, depth, begin=self._string(given, "begin", pointer)))
        if kind == "triggered_tags":
            for option in ("at_least_one", "stop_after_first"):
                if given.get(option) not in (None, False):
                    self._refuse(f"{pointer}/{option}", option, "is not enforced")
            return self._triggered(given, given.get("tags"), f"{pointer}/tags", depth)
        self._refuse(f"{pointer}/type", kind, "is not known")

    def _refuse(self, pointer: str, keyword: str, why: str) -> NoReturn:
        message = f"the structural tag cannot be enforced: {keyword!r} at {pointer} {why}"
        raise UnsupportedSchemaError(message, pointer=pointer, keyword=keyword)

    def _json(self, schema: object, pointer: str) -> str:
        try:
            made = compiled(json.dumps(schema), self._budget)
        except UnsupportedSchemaError as error:
            error.pointer = pointer + error.pointer
            raise
        return self._rule(f"%json {json.dumps({**made, 'x-guidance': self._whitespace})}")

    def _tag(self, given: dict[str, Any], pointer: str, depth: int, *, begin: str) -> str:
        """``begin``: what of its beginning has not been written yet."""
        end = self._string(given, "end", pointer)
        content = self._object(given.get("content"), f"{pointer}/content")
        if content.get("type") == "any_text" and end:
            # up to the first end: a text that held another one would not be told from two tags
            return f"{_literal(begin)} {self._rule(_ANY_TEXT, f'[suffix={json.dumps(end)}]')}"
        return f"{_literal(begin)} {self._format(content, f'{pointer}/content', depth + 1)} {_literal(end)}"

    def _triggered(self, given: dict[str, Any], tags: object, pointer: str, depth: int, *, schema_key: str = "") -> str:
        """Free text, in which a trigger begins one of the tags that start with it."""
        if not isinstance(tags, list) or not tags:
            _wrong(pointer, "a list with entries", tags)
        triggers = self._list(given, "triggers", pointer.rpartition("/")[0])
        if len(triggers) > MAX_TRIGGERS or any(not isinstance(each, str) or not each for each in triggers):
            _wrong(f"{pointer.rpartition('/')[0]}/triggers", f"a list of at most {MAX_TRIGGERS} strings", triggers)
        by_trigger: dict[str, list[str]] = {}
        for place, value in enumerate(cast("list[object]", tags)):
            at = f"{pointer}/{place}"
            tag = self._object(value, at)
            if schema_key:
                tag = {**tag, "content": {"type": "json_schema", "json_schema": tag.get(schema_key)}}
            begin = self._string(tag, "begin", at)
            trigger = next((each for each in cast("list[str]", triggers) if begin.startswith(each)), None)
            if trigger is None:
                _wrong(f"{at}/begin", "a text that starts with one of the triggers", begin)
            body = self._tag(tag, at, depth + 1, begin=begin.removeprefix(trigger))
            by_trigger.setdefault(trigger, []).append(self._rule(body))
        parts = [
            self._rule(f"{self._rule(_ANY_TEXT, f'[suffix={json.dumps(trigger)}]')} ({' | '.join(rules)})")
            for trigger, rules in by_trigger.items()
        ]
        return self._rule(f"({' | '.join(parts)})* {self._rule(_ANY_TEXT)}")


def _literal(text: str) -> str:
    return json.dumps(text) if text else '""'


def _regex(text: str) -> str:
    return "/" + text.replace("/", r"\/") + "/"
