"""Write the parts of a structural tag as rules and terminals of llguidance's dialect of Lark.

llguidance splits a text into lexemes. A lexeme continues as long as it matches, unless it is lazy. So the end of each
part must be visible without the text after it. A literal ends with its last character, a JSON value with its last
bracket. Free text and patterns end at the first occurrence of the literal or special token after them. If anything else
follows them, they are refused, because their text might never end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from aioengine.constraints.python_regex import escaped
from aioengine.errors import UnsupportedSchemaError

_TAKES_ALL: Final = (
    "has free text as an alternative to another format, and could consume its text: put a const_string before it"
)
TOKEN: Final = "%token"
"""The body of a rule for a special token, before the text of the token. The vocabulary replaces it by an id."""
_NUMBER_CHARACTERS: Final = frozenset("0123456789.eE+-")


def raise_unsupported(pointer: str, keyword: str, reason: str) -> NoReturn:
    raise UnsupportedSchemaError(f"{keyword!r} at {pointer} {reason}", pointer=pointer, keyword=keyword)


@dataclass
class Literal:
    """One of these texts."""

    texts: list[str]


@dataclass
class Token:
    """A special token. It is not part of free text, so it ends free text and patterns."""

    text: str


@dataclass
class Terminal:
    """Texts that match a Lark expression, without rules."""

    expression: str
    pointer: str


@dataclass
class FreeText:
    """Text that contains none of ``excludes``. The text of a key of ``triggers`` starts one of the rules of this key.
    If ``loops`` is set, free text continues after the rule.
    """

    pointer: str
    excludes: Sequence[str]
    triggers: dict[str, list[Rule]]
    loops: bool = True
    max_chars: int | None = None


@dataclass
class Either:
    """One of these sequences of parts."""

    sequences: list[list[Part]]
    pointer: str


class Rule(NamedTuple):
    """A part that is already written as a rule.

    Attributes:
        is_open: its end is not visible. is_number: it may end with a JSON number, which more digits would continue.
        repeats_free: it ends with a repetition of parts that start with free text, which would take the text after it.
        begins_with_token: it begins with a special token, or is empty.
    """

    name: str
    pointer: str
    is_open: bool = False
    is_number: bool = False
    repeats_free: bool = False
    begins_with_token: bool = False


Part = Literal | Token | Terminal | FreeText | Either | Rule


class TagGrammar:
    """Collects the ``lines`` of a grammar. Each part becomes a few rules, so its size is proportional to the tag."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def rule(self, body: str) -> str:
        """Add a rule and return its name."""
        return self._define("r", body)

    def write(self, parts: Sequence[Part], pointer: str) -> Rule:
        """Add a rule for parts in sequence.

        Raises:
            UnsupportedSchemaError: the end of a part would not be visible.
        """
        left = [part for part in parts if part != Literal([""])]
        names: list[str] = []
        last = Rule("", pointer)
        while left:
            last = self._first(left, pointer)
            _check_end(last, left)
            names.append(last.name)
        return last._replace(name=self.rule(" ".join(names) or '""'), pointer=pointer)

    def _first(self, left: list[Part], pointer: str) -> Rule:
        """Remove the first part and write it, together with the next parts if they form one lexeme."""
        part = left.pop(0)
        if isinstance(part, Rule):
            return part
        if isinstance(part, Token):
            return Rule(self.rule(f"{TOKEN} {json.dumps(part.text)}"), pointer)
        if isinstance(part, Literal):
            while left and isinstance(after := left[0], Literal) and len(after.texts) == 1:
                part = Literal([text + after.texts[0] for text in part.texts])
                del left[0]
            return Rule(_literals(part.texts), pointer)
        if isinstance(part, Terminal):
            run: list[Part] = [part]
            while left and isinstance(left[0], Literal | Terminal):
                run.append(left.pop(0))
            is_open = isinstance(run[-1], Terminal)
            return Rule(self._lexeme(_expression(run), is_lazy=not is_open), part.pointer, is_open)
        end = left[0] if left and isinstance(left[0], Literal) else None
        if end is not None:
            del left[0]
        if isinstance(part, FreeText):
            return Rule(self._free(part, end), part.pointer, is_open=end is None)
        _check_beside(part, is_last=end is None and not left)
        rules = [self.write([*sequence, *([end] if end else [])], part.pointer) for sequence in part.sequences]
        return Rule(
            f"({' | '.join(rule.name for rule in rules)})",
            part.pointer,
            any(rule.is_open for rule in rules),
            any(rule.is_number for rule in rules),
            any(rule.repeats_free for rule in rules),
        )

    def repeated(self, parts: list[Part], pointer: str, min_count: int, max_count: int | None) -> Part:
        """Return a part that repeats ``parts`` from ``min_count`` to ``max_count`` times; None: without a limit."""
        times = f"{{{min_count},{'' if max_count is None else max_count}}}"
        if _is_pattern(parts):
            return Terminal(f"({_expression(parts)}){times}", pointer)
        once = self.write(parts, pointer)
        _check_end(once, [once])
        repeats_free = (min_count, max_count) != (1, 1) and _begins_free(parts)
        begins_with_token = _begins_with_token(parts)
        return Rule(f"({once.name}){times}", pointer, repeats_free=repeats_free, begins_with_token=begins_with_token)

    def _define(self, prefix: str, body: str, attributes: str = "") -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _lexeme(self, expression: str, *, is_lazy: bool) -> str:
        """Add a lexeme and return its name. is_lazy: it ends as early as possible, otherwise as late as possible."""
        terminal = self._define("T", expression)
        return self._define("r", terminal, "[lazy]") if is_lazy else terminal

    def _free(self, part: FreeText, end: Literal | None) -> str:
        text = _any_text(part)
        last = self._lexeme(f"({text}) {_literals(end.texts)}" if end else text, is_lazy=end is not None)
        if not part.triggers:
            return last
        after: list[Part] = [part] if part.loops else [end] if end else []
        tags: list[str] = []
        for trigger, rules in part.triggers.items():
            for text_of_end in end.texts if end else ():
                if trigger in text_of_end[:-1]:
                    reason = f"has the trigger {trigger!r} that begins before its end {text_of_end!r} is read"
                    raise_unsupported(part.pointer, "triggers", reason)
            for rule in rules:
                _check_end(rule, after)
            begin = self._lexeme(f"({text}) {_literals([trigger])}", is_lazy=True)
            tags.append(f"{begin} ({' | '.join(rule.name for rule in rules)})")
        if part.loops:
            return f"({' | '.join(tags)})* {last}"
        return f"(({' | '.join(tags)}) {_literals(end.texts) if end else ''} | {last})"


def either(sequences: list[list[Part]], pointer: str) -> Part:
    """Return a part for one of several sequences."""
    parts = [part for sequence in sequences for part in sequence]
    literals = [part for part in parts if isinstance(part, Literal) and "" not in part.texts]
    if len(literals) == len(parts) and all(len(sequence) == 1 for sequence in sequences):
        return Literal([text for literal in literals for text in literal.texts])
    if _is_pattern(parts):
        return Terminal(" | ".join(map(_expression, sequences)), pointer)
    return Either(sequences, pointer)


def _is_pattern(parts: Sequence[Part]) -> bool:
    """Return whether the parts together are one terminal, and not only literals."""
    kinds = set(map(type, parts))
    return Terminal in kinds and kinds <= {Terminal, Literal}


def _expression(parts: Sequence[Part]) -> str:
    """Return the Lark expression of literals and terminals in sequence."""
    texts = [
        f"({part.expression})" if isinstance(part, Terminal) else _literals(part.texts)
        for part in parts
        if isinstance(part, Literal | Terminal)
    ]
    return " ".join(texts) or '""'


def _begins_free(parts: Sequence[Part]) -> bool:
    """Return whether the parts may start with free text."""
    first = parts[0] if parts else None
    return isinstance(first, FreeText) or (isinstance(first, Either) and any(map(_begins_free, first.sequences)))


def _begins_with_token(parts: Sequence[Part]) -> bool:
    """Return whether parts begin with a special token, or are empty."""
    for part in parts:
        if isinstance(part, Token):
            return True
        if isinstance(part, Either) and all(map(_begins_with_token, part.sequences)):
            continue  # may be empty
        if not isinstance(part, Rule) or not part.begins_with_token:
            return False
    return True


def _check_beside(part: Either, *, is_last: bool) -> None:
    """Refuse sequences if free text with an end would take the text of another one. is_last: nothing follows them."""
    others = [
        sequence
        for sequence in part.sequences
        if not _begins_free(sequence) and not (_begins_with_token(sequence) if sequence else is_last)
    ]
    if others and any(_begins_free(sequence) and len(sequence) > 1 for sequence in part.sequences):
        raise_unsupported(part.pointer, "format", _TAKES_ALL)


def _check_end(part: Rule, after: Sequence[Part]) -> None:
    """Refuse a part if its end is not visible. after: the parts after it."""
    if not after or (_begins_with_token(after) and not part.repeats_free):
        return
    if part.repeats_free:
        raise_unsupported(part.pointer, "format", _TAKES_ALL)
    if part.is_open:
        raise_unsupported(part.pointer, "format", "has no visible end: put a const_string or a tag after it")
    if not part.is_number or isinstance(after[0], FreeText):
        return
    if not isinstance(after[0], Literal) or any(text[:1] in _NUMBER_CHARACTERS for text in after[0].texts):
        raise_unsupported(part.pointer, "format", "may be a number, with no visible end: put a const_string after it")


def _literals(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(json.dumps, texts))})"


def _any_text(part: FreeText) -> str:
    text = f"/(?s:.{'*' if part.max_chars is None else f'{{0,{part.max_chars}}}'})/"
    if not part.excludes:
        return text
    excludes = "|".join("".join(escaped(ord(char)) for char in words) for words in part.excludes)
    return f"{text} & ~/(?s:.*)(?:{excludes})(?s:.*)/"
