"""The language of chat templates: jinja2 with the additions of transformers.

Templates come with the model or with a request, so they run in a sandbox, within the limits of ``template_limits``.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial, wraps
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes, pass_environment, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter, sync_do_join
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from aioengine import checks
from aioengine.tokenization import template_limits as limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jinja2 import Environment
    from jinja2 import Template as JinjaTemplate
    from jinja2.lexer import Token, TokenStream
    from jinja2.nodes import EvalContext
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    Write = Callable[[Any, Frame], None]

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
"""Characters of an error message: a template may write any text there."""


class Template:
    """A compiled template.

    Attributes:
        content: the form of messages' content that it writes; None: not known yet.
    """

    def __init__(self, source: str) -> None:
        """Compile it.

        Raises:
            ValueError: it is not a valid template, or too large.
        """
        self.content: str | None = None
        try:
            compile_source = partial(_environment().from_string, source)
            self._template: JinjaTemplate = limits.run(limits.compilation_budget(), compile_source)
        except TemplateSyntaxError as error:
            reason = _shortened(error.message or "")
            raise ValueError(f"the chat template is not valid (line {error.lineno}): {reason}") from error
        except limits.TemplateLimitError as error:
            raise ValueError(f"the chat template is too large: {error}") from error
        except ValueError as error:  # such as a number of too many digits
            raise ValueError(f"the chat template is not valid: {_shortened(str(error))}") from error
        except (MemoryError, RecursionError, SyntaxError) as error:  # from Python's own compiler
            raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """Write a chat as text.

        Raises:
            ValueError: the template refuses these variables, or fails with them.
        """
        try:
            text = limits.run(limits.chat_budget(variables), partial(self._template.render, variables))
        except limits.TemplateLimitError as error:
            raise ValueError(f"the chat template was stopped: {error}") from error
        except _ERRORS as error:
            raise ValueError(f"the chat template refused the messages: {_shortened(str(error))}") from error
        return checks.text("what the chat template writes", text)


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}... ({len(message)} characters)"


# ---------------------------------------------------------------- additions of transformers


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own text, for training; here its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            limits.budget().tick()
            yield token


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    limits.check_short("strftime_now", form)
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    *,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As ``json.dumps``, without the escapes for HTML of jinja2's own filter."""
    limits.check_count("the indent of tojson", indent)
    limits.check_short("separators= of tojson", separators)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return limits.concatenated(encoder.iterencode(value))


class _Namespace(Namespace):
    """Written as its type alone: namespaces may hold each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    functions = cast("dict[str, Callable[..., object]]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    functions["namespace"] = _Namespace
    for name in ("cycler", "joiner", "lipsum"):  # made for web pages, and they hold or write values without a limit
        del functions[name]
    return environment


# ---------------------------------------------------------------- every step within the limits


class _CodeGenerator(CodeGenerator):
    """Generates code that checks the time at each turn of a loop, and the size of all that operators build."""

    def write(self, x: str) -> None:
        limits.budget().spend(len(x))
        super().write(x)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_call("built", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_call("built", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_call("built", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("), " + ("markup_join" if escapes else "str_join") + ")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._write_call("copied", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_call(self, function: str, write: Write, node: nodes.Expr, frame: Frame) -> None:
        self.write(f"environment.{function}(")
        write(node, frame)
        self.write(")")


_PADDING = ("center", "ljust", "rjust", "zfill")
_SEARCHES = ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip")
"""Methods that may compare each character of a text with each of their argument."""
_TEXT_METHODS = {*_PADDING, *_SEARCHES, "capitalize", "casefold", "count", "endswith", "find", "format", "index"} | {
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper"),
    *("join", "lower", "partition", "removeprefix", "removesuffix", "replace", "split", "splitlines", "startswith"),
    *("swapcase", "title", "upper"),
}
_METHODS: dict[type, set[str]] = {
    str: _TEXT_METHODS,
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index", "grouper", "list"},  # the last two: of the groups of groupby
    float: {"is_integer"},
    int: set(),
    type: set(),
}
"""The attributes that a template may use, by type. Each gives a result of about the size of its value or arguments, or
is checked before it is called."""
_FORMATTED = (str, int, float, list, tuple, dict, range, Namespace, Undefined, type(None))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("**", "*", "%", "+", "/", "//"))
    concat = staticmethod(limits.concatenated)
    built = staticmethod(limits.built)
    copied = staticmethod(limits.copied)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        filters: dict[str, Callable[..., Any]] = self.filters  # pyright: ignore[reportUnknownMemberType]
        filters = {**filters, "join": _join, "sum": _sum, "tojson": _tojson}
        self.filters = {name: _bounded(name, each) for name, each in filters.items()}
        tests = cast("Mapping[str, Callable[..., Any]]", self.tests)  # pyright: ignore[reportUnknownMemberType]
        self.tests = {name: _timed(each) for name, each in tests.items()}

    @property
    def tick(self) -> None:
        """Check the time: generated code reads this at every turn of a loop."""
        limits.budget().tick()

    @staticmethod
    def joined(parts: tuple[object, ...], join: Callable[[tuple[object, ...]], str]) -> str:
        limits.budget().spend(limits.measured(parts))
        return join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return (allowed is None or attr in allowed) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the usual case
            limits.budget().spend(len(left) + len(right))
            return left + right
        limits.check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        limits.budget().tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, dict | list | tuple):  # their methods give what they hold
            return super().call(context, obj, *args, **kwargs)
        if isinstance(owner, str):
            args = _checked_method(owner, obj.__name__, args)
        elif isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):  # it gets new containers of them
            limits.measured((args, kwargs))
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
            limits.spend_formatted(value.__self__, "{", given)
            return write(*args, **kwargs)

        return checked


def _checked_method(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method of text. Raises TemplateLimitError if its result would be too large."""
    if name == "join" and args:
        args = (limits.listed(args[0]),)
        limits.spend_joined(owner, args[0])
    elif name == "replace" and len(args) > 1:
        limits.spend_replaced(owner, *args[:3])
    elif name in _PADDING and args:
        limits.check_count(f"{name}()", args[0])
    elif name in _SEARCHES:
        limits.check_search(owner, *args)
    return args


def _timed(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def timed(*args: Any, **kwargs: Any) -> Any:
        limits.budget().tick()
        return test(*args, **kwargs)

    return timed


# ---------------------------------------------------------------- filters

_SLOW = {"striptags": 64 * 1024, "urlize": 64 * 1024, "wordwrap": 64 * 1024, "xmlattr": 64 * 1024} | dict.fromkeys(
    ("pprint", "title", "urlencode", "wordcount"), 1024 * 1024
)
"""Filters that take long for their value -> its largest size."""
_WITH_ATTRIBUTE = {
    "dictsort",
    "groupby",
    "join",
    "map",
    "max",
    "min",
    "rejectattr",
    "selectattr",
    "sort",
    "sum",
    "unique",
}
_COPYING = {"d", "default", "first", "last", "list", "max", "min", "random", "reverse", "sort", "unique"}
"""Filters whose result holds parts of their value, each at most as often."""


def _bounded(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the limits; ``jinja_pass_arg`` says that it takes a context first.

    A generator is read to its end at once: so its values are limited, and no chain of generators can grow.
    """
    first = 1 if hasattr(plain, "jinja_pass_arg") else 0
    check, most = _CHECKS.get(name), _SLOW.get(name)

    @wraps(plain)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        limits.budget().tick()
        value, given = args[first], (*args[first + 1 :], *kwargs.values())
        if most is not None:
            limits.check_short(f"the filter {name}", value, most)
            limits.check_short(f"the filter {name}", given)
        elif name in _WITH_ATTRIBUTE:
            limits.check_short(f"the filter {name}", [each for each in given if isinstance(each, str)])
        if check is not None:
            check(*args[first:], **kwargs)
        found = plain(*args, **kwargs)
        if isinstance(found, GeneratorType):
            return iter(limits.listed(cast("Iterator[object]", found)))
        is_copy = name in _COPYING and isinstance(value, str | list | tuple | dict)
        return limits.copied(found) if is_copy else limits.built(found)

    return bounded


@pass_eval_context
def _join(context: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    values = _taken(context.environment, value, attribute)
    limits.spend_joined(str(d), values)
    return sync_do_join(context, values, d)


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    values = _taken(environment, iterable, attribute)
    if not isinstance(start, int | float):  # a list is copied for each further one
        limits.budget().spend(len(values) * limits.measured(values))
    return sum(values, start)


def _taken(environment: Environment, value: Any, attribute: Any) -> list[Any]:
    return limits.listed(value if attribute is None else map(make_attrgetter(environment, attribute), value))


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    limits.check_count("indent", width)
    num_characters = len(width) if isinstance(width, str) else int(width)
    limits.budget().spend(len(s) + (s.count("\n") + 1) * max(num_characters, 0))


def _check_trim(value: Any, chars: Any = None) -> None:
    limits.check_search(str(value), chars)


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    limits.spend_formatted(str(value), "%", kwargs or args)


def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    limits.spend_replaced(str(s), str(old), str(new), count)


def _check_argument(value: Any, *args: Any, **kwargs: Any) -> None:
    for each in (*args[:1], *kwargs.values()):
        limits.check_count("the argument of a filter", each)


_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("batch", "center", "round", "slice"), _check_argument),
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace,
    "trim": _check_trim,
}
"""By filter: raises TemplateLimitError if its result would be too large. The arguments are those of the filter."""
