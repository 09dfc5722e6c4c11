"""TextReader: text that arrives in pieces, as the generator of a format reads it.

A generator yields when it needs more text, and never after the end of the text. Each of its decisions depends on the
text alone, not on the pieces in which it arrives. So patterns must have a definite end: ``a*`` at the end of a pattern
would match less if the piece ends early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from typing import Any, Final, TypeAlias, TypeVar, cast

import regex

from aioengine.parsing._events import Content, Event, Reasoning, ToolArguments, ToolCallBegin, ToolCallEnd

Match: TypeAlias = regex.Match[str]
Pattern: TypeAlias = regex.Pattern[str]

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""A part of a generator that reads text. Its result is the value of ``yield from``."""
Emit: TypeAlias = Callable[[str], None]

SPACES: Final = r"[ \t\r\n]{0,64}"
"""Whitespace beside a tag, which belongs to the tag. The limit bounds the text that is held back."""

_HEAD: Final = regex.compile(
    rf'{SPACES}\{{{SPACES}(?:"type"{SPACES}:{SPACES}"function"{SPACES},{SPACES})?"name"{SPACES}:{SPACES}"([^"\\<\x00-\x1f]{{1,256}})"{SPACES},{SPACES}'
    rf'"(?:arguments|parameters)"{SPACES}:{SPACES}\{{'
)
"""The usual beginning of a call in JSON, up to the brace of its arguments."""
_REST: Final = regex.compile(rf'{SPACES}(?:,{SPACES}"id"{SPACES}:{SPACES}"[^"\\]{{0,256}}"{SPACES})?\}}')
_BRACE: Final = regex.compile(rf"{SPACES}\{{")
_SPACE: Final = regex.compile(r"[ \t\r\n]")
_OUTSIDE: Final = regex.compile(r"[^\w \t\r\n.,:+-]")
_STRING: Final = regex.compile(r'(?:[^"\\]|\\.)*+', regex.DOTALL)


class TextReader:
    """The text that is not read yet, and the events found so far."""

    def __init__(self, read: Callable[[TextReader], Steps[None]]) -> None:
        """read: makes the generator that reads the text."""
        self.is_over = False
        self._text = ""
        self._at = 0
        self._events: list[Event] = []
        self._num_calls = 0
        self._steps = read(self)

    def read(self, text: str, *, is_over: bool) -> list[Event]:
        """Read the next piece of text, and return the events that are certain now. is_over: it is the last piece."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self.is_over = is_over
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ events

    def content(self, text: str) -> None:
        """Emit text as content."""
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Emit text as reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        """Begin a tool call."""
        self._events.append(ToolCallBegin(self._num_calls, name))

    def arguments(self, text: str) -> None:
        """Emit a piece of the arguments of the tool call."""
        if text:
            self._events.append(ToolArguments(self._num_calls, text))

    def end_call(self) -> None:
        """End the tool call."""
        self._events.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1

    # ------------------------------------------------------------ text

    def find(self, pattern: Pattern, emit: Emit) -> Steps[Match | None]:
        """Remove and return the next match, and give the text before it to ``emit``; None: there is none."""
        while True:
            match = pattern.search(self._text, self._at, partial=not self.is_over)
            emit(self._take(len(self._text) if match is None else match.start()))
            if match is not None and not match.partial:
                self._at = match.end()
                return match
            if self.is_over:
                return None
            yield

    def take(self, pattern: Pattern) -> Steps[Match | None]:
        """Remove and return a match at the start of the text; None: there is none."""
        while True:
            match = pattern.match(self._text, self._at, partial=not self.is_over)
            if match is None or not match.partial:
                self._at = match.end() if match else self._at
                return match
            yield

    def skip_spaces(self) -> Steps[None]:
        """Remove whitespace."""
        while (yield from self.take(_SPACE)):
            pass

    def end_tags(self, *patterns: Pattern) -> Steps[None]:
        """Remove the tags after a call, and whitespace. A tag may be missing, or cut off by the end of the text."""
        for pattern in patterns:
            found = yield from self.take(pattern)
            if not found and self.is_over and (cut := pattern.match(self._text, self._at, partial=True)):
                self._at = cut.end()
        yield from self.skip_spaces()

    def rest(self, emit: Emit) -> Steps[None]:
        """Give the text up to the end to ``emit``."""
        while True:
            emit(self._take(len(self._text)))
            if self.is_over:
                return
            yield

    def _take(self, end: int) -> str:
        """Remove and return the text up to ``end``."""
        start, self._at = self._at, end
        return self._text[start:end]

    # ------------------------------------------------------------ JSON

    def json_object(self, emit: Emit) -> Steps[bool]:
        """Read an object after its first brace, and give its text to ``emit``. Return whether it is complete.

        Only strings and brackets are checked. The object also ends before a character that JSON has only in strings.
        """
        depth, is_string = 1, False
        while True:
            at = self._at
            while depth and at < len(self._text):
                if is_string:
                    at = cast("Match", _STRING.match(self._text, at)).end()
                    if self._text[at : at + 1] != '"':
                        break  # the end of the text, maybe after half of an escape
                    is_string = False
                else:
                    match = _OUTSIDE.search(self._text, at)
                    at = len(self._text) if match is None else match.start()
                    if match is None:
                        break
                    if match[0] not in '"{}[]':
                        emit(self._take(at))
                        return False
                    is_string = match[0] == '"'
                    depth += (match[0] in "{[") - (match[0] in "}]")
                at += 1
            emit(self._take(len(self._text) if self.is_over and depth else at))
            if self.is_over or not depth:
                return not depth
            yield

    def call(self, name: str) -> Steps[bool]:
        """Emit a tool call whose arguments are the next object, after its first brace. Return whether they are
        complete.
        """
        self.begin_call(name)
        self.arguments("{")
        is_complete = yield from self.json_object(self.arguments)
        self.end_call()
        return is_complete

    def json_call(self, names: Collection[str] | None = None) -> Steps[str | None]:
        """Read an object with a name and arguments, and give it out as a tool call.

        Return None. If it is no such object, return the text that was read and not given out. names: the names that
        are allowed; the object must then begin with its name.
        """
        head = yield from self.take(_HEAD)
        if head is not None and names is not None and head[1] not in names:
            return head[0]
        if head is not None:
            if (yield from self.call(head[1])):
                yield from self.take(_REST)
            return None
        brace = None if names is not None else (yield from self.take(_BRACE))
        if brace is None:
            return ""
        pieces = [brace[0]]
        yield from self.json_object(pieces.append)
        text = "".join(pieces)
        call = _call_of(text)
        if call is None:
            return text
        self.begin_call(call[0])
        self.arguments(call[1])
        self.end_call()
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a tool call, from the JSON text of an object; None: it is none."""
    try:
        value = cast("dict[str, Any]", json.loads(text))
        name = value["name"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # JSON in a string
            arguments = json.loads(arguments)
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments)
