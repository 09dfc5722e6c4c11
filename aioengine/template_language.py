"""The language of chat templates: jinja2 with what transformers offers in it.

Templates come with the model, so they run in a sandbox.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2.parser import Parser

_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the code of a template may raise."""


class Template:
    """A template that can be written out.

    Attributes:
        takes_parts: whether it knows contents that are lists of parts; None where nobody has tried.
    """

    def __init__(self, source: str) -> None:
        """Compile it.

        Raises:
            ValueError: it is no template.
        """
        self.takes_parts: bool | None = None
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {error.message}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Write it out.

        Raises:
            ValueError: it refuses these values, or cannot deal with them.
        """
        try:
            return self._template.render(variables)
        except _ERRORS as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    *,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As ``json.dumps``, without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the templates of model folders expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]  # untyped there
    functions = cast("dict[str, Callable[..., object]]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment
