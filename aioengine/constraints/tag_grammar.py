"""The parts of a structural tag, written as rules and terminals of llguidance's dialect of Lark.

The library splits a text into lexemes, and a lexeme goes on for as long as it can, unless it is lazy. So the end of
each part must be seen without what follows: a literal ends with its last character and a JSON value with its last
bracket, but free text and patterns end where the literal behind them comes first. Such a part with anything else
behind it is refused: its text might never end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from aioengine.constraints.python_regex import escaped
from aioengine.errors import UnsupportedSchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TAKES_ALL: Final = (
    "has free text that may stand in place of another format, and would take its text: put a const_string before it"
)
_NUMBER_GOES_ON: Final = frozenset("0123456789.eE+-")


def refuse(pointer: str, keyword: str, why: str) -> NoReturn:
    message = f"{keyword!r} at {pointer} {why}"
    raise UnsupportedSchemaError(message, pointer=pointer, keyword=keyword)


@dataclass
class Literal:
    """One of these texts."""

    texts: list[str]


@dataclass
class Terminal:
    """The texts of a terminal, as a Lark expression."""

    expression: str
    pointer: str


@dataclass
class FreeText:
    """Text in which none of ``excludes`` stands. A key of ``triggers`` begins one of its rules, behind which free text
    goes on where ``loops``.
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
    """A rule that is written.

    Attributes:
        is_open: its end is not seen. is_number: it may end with a JSON number, to which further digits would belong.
        repeats_free: it ends with what begins with free text and may come again: that would take what stands behind.
    """

    name: str
    pointer: str
    is_open: bool = False
    is_number: bool = False
    repeats_free: bool = False


Part = Literal | Terminal | FreeText | Either | Rule


class TagGrammar:
    """Rules are named by numbers; each part becomes a few, so that the text grows with the tag alone.

    Attributes:
        lines: of the grammar.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        return self._define("r", body)

    def write(self, parts: Sequence[Part], pointer: str) -> Rule:
        """A rule for parts that stand one behind the other.

        Raises:
            UnsupportedSchemaError: the end of one of them would not be seen.
        """
        left = [each for each in parts if each != Literal([""])]
        names: list[str] = []
        last = Rule("", pointer)
        while left:
            last = self._first(left, pointer)
            _check_end(last, left)
            names.append(last.name)
        return last._replace(name=self.rule(" ".join(names) or '""'), pointer=pointer)

    def _first(self, left: list[Part], pointer: str) -> Rule:
        """Take and write the first of the parts, with others where they are read together."""
        part = left.pop(0)
        if isinstance(part, Rule):
            return part
        if isinstance(part, Literal):
            while left and isinstance(behind := left[0], Literal) and len(behind.texts) == 1:
                part = Literal([each + behind.texts[0] for each in part.texts])
                del left[0]
            return Rule(_literals(part.texts), pointer)
        if isinstance(part, Terminal):
            run: list[Part] = [part]
            while left and isinstance(left[0], Literal | Terminal):
                run.append(left.pop(0))
            is_open = isinstance(run[-1], Terminal)
            return Rule(self._lexeme(_expression(run), is_lazy=not is_open), part.pointer, is_open)
        end = left[0] if left and isinstance(left[0], Literal) else None
        del left[: end is not None]
        if isinstance(part, FreeText):
            return Rule(self._free(part, end), part.pointer, is_open=end is None)
        _check_beside(part, is_last=end is None and not left)
        rules = [self.write([*each, *([end] if end else [])], part.pointer) for each in part.sequences]
        return Rule(
            f"({' | '.join(each.name for each in rules)})",
            part.pointer,
            any(each.is_open for each in rules),
            any(each.is_number for each in rules),
            any(each.repeats_free for each in rules),
        )

    def repeated(self, parts: list[Part], pointer: str, least: int, most: int | None) -> Part:
        """These parts ``least`` to ``most`` times; None: any number."""
        times = f"{{{least},{'' if most is None else most}}}"
        if _is_pattern(parts):
            return Terminal(f"({_expression(parts)}){times}", pointer)
        once = self.write(parts, pointer)
        _check_end(once, [once])
        return Rule(f"({once.name}){times}", pointer, repeats_free=(least, most) != (1, 1) and _begins_free(parts))

    def _define(self, prefix: str, body: str, attributes: str = "") -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def _lexeme(self, expression: str, *, is_lazy: bool) -> str:
        """Of this terminal. is_lazy: it ends as early as it may, else as late."""
        terminal = self._define("T", expression)
        return self._define("r", terminal, "[lazy]") if is_lazy else terminal

    def _free(self, part: FreeText, end: Literal | None) -> str:
        text = _any_text(part)
        last = self._lexeme(f"({text}) {_literals(end.texts)}" if end else text, is_lazy=end is not None)
        if not part.triggers:
            return last
        behind = [part] if part.loops else [end] if end else []
        tags: list[str] = []
        for trigger, rules in part.triggers.items():
            for text_of_end in end.texts if end else ():
                if trigger in text_of_end[:-1]:
                    why = f"has the trigger {trigger!r} that begins before its end {text_of_end!r} is read"
                    refuse(part.pointer, "triggers", why)
            for rule in rules:
                _check_end(rule, behind)
            begin = self._lexeme(f"({text}) {_literals([trigger])}", is_lazy=True)
            tags.append(f"{begin} ({' | '.join(rule.name for rule in rules)})")
        if part.loops:
            return f"({' | '.join(tags)})* {last}"
        return f"(({' | '.join(tags)}) {_literals(end.texts) if end else ''} | {last})"


def either(sequences: list[list[Part]], pointer: str) -> Part:
    """One of these sequences."""
    parts = [part for each in sequences for part in each]
    if all(len(each) == 1 and isinstance(each[0], Literal) and "" not in each[0].texts for each in sequences):
        return Literal([text for part in parts if isinstance(part, Literal) for text in part.texts])
    if _is_pattern(parts):
        return Terminal(" | ".join(_expression(each) for each in sequences), pointer)
    return Either(sequences, pointer)


def _is_pattern(parts: Sequence[Part]) -> bool:
    """Whether they are one terminal, and not just literals."""
    return all(isinstance(part, Literal | Terminal) for part in parts) and any(
        isinstance(part, Terminal) for part in parts
    )


def _expression(parts: Sequence[Part]) -> str:
    """That of literals and patterns which stand one behind the other."""
    texts = [
        f"({part.expression})" if isinstance(part, Terminal) else _literals(part.texts)
        for part in parts
        if isinstance(part, Literal | Terminal)
    ]
    return " ".join(texts) or '""'


def _begins_free(parts: Sequence[Part]) -> bool:
    """Whether they may begin with free text."""
    first = parts[0] if parts else None
    return isinstance(first, FreeText) or (isinstance(first, Either) and any(map(_begins_free, first.sequences)))


def _check_beside(part: Either, *, is_last: bool) -> None:
    """Whether free text that has an end takes the text of no other sequence; ``is_last``: nothing is behind them."""
    others = [each for each in part.sequences if not _begins_free(each) and (each or not is_last)]
    if others and any(_begins_free(each) and len(each) > 1 for each in part.sequences):
        refuse(part.pointer, "format", _TAKES_ALL)


def _check_end(part: Rule, behind: Sequence[Part]) -> None:
    """Whether its end is seen, with these parts behind it."""
    if not behind:
        return
    if part.repeats_free:
        refuse(part.pointer, "format", _TAKES_ALL)
    if part.is_open:
        refuse(part.pointer, "format", "has no end that could be seen: put a const_string or a tag behind it")
    if not part.is_number or isinstance(behind[0], FreeText):
        return
    if not isinstance(behind[0], Literal) or any(text[:1] in _NUMBER_GOES_ON for text in behind[0].texts):
        refuse(part.pointer, "format", "may be a number, whose end is not seen: put a const_string behind it")


def _literals(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(json.dumps, texts))})"


def _any_text(part: FreeText) -> str:
    text = f"/(?s:.{'*' if part.max_chars is None else f'{{0,{part.max_chars}}}'})/"
    if not part.excludes:
        return text
    found = "|".join("".join(escaped(ord(char)) for char in each) for each in part.excludes)
    return f"{text} & ~/(?s:.*)(?:{found})(?s:.*)/"
