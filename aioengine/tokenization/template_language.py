"""Compiles and renders chat templates with jinja2's sandbox and the same additions as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from aioengine.api import checks

MAX_TEXT: Final = 64 * 1024 * 1024
"""Characters of a rendered chat."""


class Template:
    """A compiled template.

    Attributes:
        content: the form of message content that the template writes; None: not known yet.
    """

    def __init__(self, source: str) -> None:
        """Compile it. Raises ValueError if it is not a valid template."""
        self.content: str | None = None
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            reason = f"{error.message!s:.1000}"
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {reason}") from error
        except (MemoryError, RecursionError, SyntaxError, ValueError) as error:  # too deep, or a number too long
            reason = f"{type(error).__name__}: {error!s:.1000}"
            raise ValueError(f"the chat template cannot be compiled: {reason}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Write a chat as text. Raises ValueError if the template fails with these variables."""
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template may raise nearly anything
            raise ValueError(f"the chat template refused the messages: {error!s:.1000}") from error
        return checks.text("the text that the chat template writes", text)


def _joined(pieces: Iterable[str]) -> str:
    """Join pieces of output. Raises ValueError above ``MAX_TEXT``."""
    written: list[str] = []
    size = 0
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            raise ValueError(f"it writes more than {MAX_TEXT} characters")
    return "".join(written)


class _Sandbox(ImmutableSandboxedEnvironment):
    concat = staticmethod(_joined)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse attributes of types: ``dict`` is the only type that templates use."""
        return (not isinstance(obj, type) or attr == "fromkeys") and super().is_safe_attribute(obj, attr, value)


class _Namespace(Namespace):
    """Has no names that begin with an underscore, since jinja2 would read them as Python's own attributes."""

    def __init__(self, /, *values: Any, **named: Any) -> None:
        super().__init__()
        for name, value in dict(*values, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have {name!r}: its names must not begin with an underscore")
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training. Here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``json.dumps``. jinja2's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    filters = cast("dict[str, Callable[..., object]]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _tojson
    functions = cast("dict[str, Callable[..., object]]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
    return environment
