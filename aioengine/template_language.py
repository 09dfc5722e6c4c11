"""The language of chat templates: jinja2 with what transformers offers in it.

Templates come with the model, so they run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jinja2 import Environment, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_trim, make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from aioengine import checks
from aioengine import template_limits as limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from jinja2 import Template as JinjaTemplate
    from jinja2.lexer import Token, TokenStream
    from jinja2.parser import Parser
    from jinja2.runtime import Context

_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the code of a template may raise."""


MAX_MESSAGE = 1000
"""Of the message of an error, in characters: a template may write any text there."""


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
            compile_source = partial(_environment().from_string, source)
            self._template: JinjaTemplate = limits.run(limits.compilation_budget(), compile_source)
        except TemplateSyntaxError as error:
            reason = _shortened(error.message or "")
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {reason}") from error
        except limits.TemplateLimitError as error:
            raise ValueError(f"the chat template is too large: {error}") from error
        except (MemoryError, RecursionError, SyntaxError) as error:  # of Python's own compiler
            raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Write it out.

        Raises:
            ValueError: it refuses these values, or cannot deal with them.
        """
        try:
            budget = limits.chat_budget(variables)
            text = limits.run(budget, partial(self._template.render, variables))
        except limits.TemplateLimitError as error:
            raise ValueError(f"the chat template was stopped: {error}") from error
        except _ERRORS as error:
            raise ValueError(f"the chat template refused the messages: {_shortened(str(error))}") from error
        return checks.text("what the chat template writes", text)


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}... ({len(message)} characters)"


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Timing(Extension):
    """Every token of a template that is compiled asks for the time."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            limits.tick()
            yield token


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
    limits.check_count("the indent of tojson", len(indent) if isinstance(indent, str) else indent)
    if limits.size_of(separators, MAX_ARGUMENT) > MAX_ARGUMENT:
        raise limits.TemplateLimitError(f"the separators of tojson have more than {MAX_ARGUMENT} characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _concatenated(encoder.iterencode(value))


def _environment() -> _Environment:
    """What the templates of model folders expect to find."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, _Timing, loopcontrols]
    )
    functions = cast("dict[str, Callable[..., object]]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    functions["namespace"] = _Namespace
    del functions["lipsum"]  # words without a limit, for designers of web pages
    return environment


# ---------------------------------------------------------------- every step within the limits


class _Namespace(Namespace):
    """Written out as its kind alone: namespaces may hold each other, and what they hold has no limit."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _concatenated(pieces: Iterable[str]) -> str:
    """Pieces of output as one text."""
    found: list[str] = []
    size, limit = 0, limits.allow(0)
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > limit:
            limit = limits.allow(size)
    limits.spend(size)
    return "".join(found)


MAX_SUMMANDS = 16


def _summands(node: nodes.Expr) -> list[nodes.Expr]:
    """a, b and c of ``a + b + c``."""
    found: list[nodes.Expr] = []
    while isinstance(node, nodes.Add):
        found.append(node.right)
        node = node.left
    return [node, *reversed(found)]


class _CodeGenerator(CodeGenerator):
    """Makes code that asks for every turn of a loop, and for all that it builds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._written: set[int] = set()

    def write(self, x: str) -> None:
        limits.tick()
        super().write(x)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.Const(_TICK), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.Const) and node.node.value is _TICK:
            self.writeline("environment.tick()")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_built(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._write_built(super().visit_Tuple, node, frame, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_built(super().visit_Dict, node, frame, [pair.value for pair in node.items])

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        self._written |= {id(child) for child in node.nodes}
        super().visit_Output(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Text is put together in most templates at most places: as one step, which is looked at when it is done.

        What is written out at once is looked at there.
        """
        parts = _summands(node)
        if len(parts) > MAX_SUMMANDS or not any(
            isinstance(part, nodes.Const) and isinstance(part.value, str) for part in parts
        ):
            super().visit_Add(node, frame)
            return
        self.write("(" if id(node) in self._written else "environment.copied(")
        for place, part in enumerate(parts):
            self.write(" + " if place else "")
            self.visit(part, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("), " + ("markup_join" if escapes else "str_join") + ")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._write_call("environment.copied", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_built(self, write: _Write, node: nodes.Expr, frame: Frame, items: Sequence[nodes.Node]) -> None:
        """Constants cannot be large together: they stand in the template."""
        if all(isinstance(item, nodes.Const) for item in items):
            write(node, frame)
        else:
            self._write_call("environment.built", write, node, frame)

    def _write_call(self, function: str, write: _Write, node: nodes.Expr, frame: Frame) -> None:
        self.write(f"{function}(")
        write(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits. Nothing is computed by operators while a template is compiled."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("**", "*", "%", "+", "/", "//"))
    concat = staticmethod(_concatenated)
    tick = staticmethod(limits.tick)
    built = staticmethod(limits.built)
    copied = staticmethod(limits.copied)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        filters: dict[str, Callable[..., Any]] = self.filters  # pyright: ignore[reportUnknownMemberType]
        bounded = {name: _bounded_filter(name, each) for name, each in filters.items() if name not in _SIMPLE_FILTERS}
        self.filters = {**filters, **bounded, "trim": _trim, "tojson": _bounded_filter("tojson", _tojson)}
        tests = cast("Mapping[str, Callable[..., Any]]", self.tests)  # pyright: ignore[reportUnknownMemberType]
        self.tests = {name: each if name in _SIMPLE_TESTS else _timed(each) for name, each in tests.items()}

    @staticmethod
    def joined(parts: tuple[object, ...], join: Callable[[tuple[object, ...]], str]) -> str:
        limits.spend(limits.measured(parts))
        return join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is int and type(right) is int and 0 <= left < _SMALL and 0 <= right < _SMALL and operator != "**":
            return self.binop_table[operator](left, right)  # the usual case
        limits.check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        limits.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, dict | list | tuple):  # their methods give what is in them
            return super().call(context, obj, *args, **kwargs)
        if isinstance(owner, str | bytes | int):
            name: str = obj.__name__
            if name == "join" and args:
                args = (limits.listed(args[0]), *args[1:])
            limits.allow(limits.method_size(owner, name, [*args, *kwargs.values()]))
        return limits.built(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        write = super().wrap_str_format(value)
        if write is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            given = [*args, *kwargs.values()]
            for each in given:
                if not isinstance(each, _FORMATTED):
                    raise limits.TemplateLimitError(f"format() of a value of type {type(each).__name__}")
            limits.spend(limits.formatted_size(value.__self__, "{", given))
            return write(*args, **kwargs)

        return checked


_SIMPLE_FILTERS = frozenset(("capitalize", "count", "d", "default", "first", "length", "lower", "upper"))
"""Their result is about as large as their value at most, and made at once."""

_Write = Callable[[Any, Frame], None]
_TICK = object()
_SMALL = limits.SMALL
_FORMATTED = (str, bytes, int, float, list, tuple, dict, range, Namespace, Undefined, type(None))
_SIMPLE_TESTS = {"boolean", "callable", "defined", "escaped", "even", "false", "filter", "float", "integer"} | {
    *("iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined")
}


# ---------------------------------------------------------------- filters

MAX_ARGUMENT = 1000
"""Of the arguments of some filters that are short in every sensible use."""
_SLOW = {"striptags": 64 * 1024, "urlize": 64 * 1024, "wordwrap": 64 * 1024, "xmlattr": 64 * 1024} | dict.fromkeys(
    ("pprint", "title", "urlencode", "wordcount"), 1024 * 1024
)
"""Filters that take long for their text, and how large it may be."""
_WITH_ATTRIBUTE = frozenset(("dictsort", "groupby", "map", "max", "min", "rejectattr", "selectattr", "sum")) | {
    "sort",
    "unique",
}
_COPYING = frozenset(["d", "default", "first", "last", "list", "max", "min", "random", "reverse", "sort", "unique"])


def _bounded_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that builds nothing too large; ``jinja_pass_arg`` says that it takes a context first."""
    first = 1 if hasattr(plain, "jinja_pass_arg") else 0
    check, prepare = _CHECKS.get(name), _PREPARED.get(name)

    @wraps(plain)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        limits.tick()
        context, given = args[:first], args[first:]
        if name in _SLOW:
            _check_slow(name, [*given, *kwargs.values()])
        elif name in _WITH_ATTRIBUTE:
            _check_attributes(name, [*given[1:], *kwargs.values()])
        if check is not None:
            check(*given, **kwargs)
        if prepare is not None:
            environment = getattr(context[0], "environment", context[0])
            return limits.built(plain(*context, *prepare(environment, *given, **kwargs)))
        found = plain(*args, **kwargs)
        is_copy = name in _COPYING and bool(given) and isinstance(given[0], str | list | tuple | dict)
        return limits.copied(found) if is_copy else limits.built(found)

    return bounded


def _timed(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def timed(*args: Any, **kwargs: Any) -> Any:
        limits.tick()
        return test(*args, **kwargs)

    return timed


def _check_slow(name: str, given: list[Any]) -> None:
    most = _SLOW[name]
    if limits.size_of(given[:1], most) > most or limits.size_of(given[1:], MAX_ARGUMENT) > MAX_ARGUMENT:
        raise limits.TemplateLimitError(f"{name} takes values of at most {most} bytes")


def _check_attributes(name: str, given: list[Any]) -> None:
    for each in given:
        if isinstance(each, str) and len(each) > MAX_ARGUMENT:
            raise limits.TemplateLimitError(f"an argument of {name} has more than {MAX_ARGUMENT} characters")


def _check_batch(value: Any, linecount: Any, fill_with: Any = None) -> None:
    limits.check_count("batch", linecount)


def _check_slice(value: Any, slices: Any, fill_with: Any = None) -> None:
    limits.check_count("slice", slices)


def _check_center(value: Any, width: Any = 80) -> None:
    limits.check_count("center", width)


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    limits.check_count("round", precision)


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    num_characters = len(width) if isinstance(width, str) else int(width)
    text = str(s)
    limits.spend(len(text) + (len(text.splitlines()) + 1) * max(num_characters, 0))


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    limits.spend(limits.replaced_size(str(s), str(old), str(new), -1 if count is None else count))


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    limits.spend(limits.formatted_size(str(value), "%", kwargs or args))


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_batch,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_slice,
}
"""By filter: raises TemplateLimitError where its result would be too large. The arguments are those of the filter."""


def _trim(value: Any, chars: str | None = None) -> str:
    if chars is not None:
        limits.check_search(str(value), chars)
    return do_trim(value, chars)


def _join(environment: Environment, value: Any, d: Any = "", attribute: Any = None) -> tuple[Any, ...]:
    """The arguments of ``join``, with all that is to be joined in a list."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    values = limits.listed(value)
    limits.spend(limits.joined_size(str(d), values))
    return values, d


def _sum(environment: Environment, value: Any, attribute: Any = None, start: Any = 0) -> tuple[Any, ...]:
    """The arguments of ``sum``; lists are copied for every further one."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    values = limits.listed(value)
    if not isinstance(start, int | float):
        limits.spend(len(values) * limits.measured(values))
    return values, None, start


_PREPARED: dict[str, Callable[..., tuple[Any, ...]]] = {"join": _join, "sum": _sum}
"""By filter: its arguments with generators read and attributes taken."""
