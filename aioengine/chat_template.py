"""Chats as the text that a model expects, by the templates of its folder.

Templates are written in jinja2 for what transformers offers them; they come with the model, so they run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jinja2 import Template
    from jinja2.parser import Parser

Json: TypeAlias = dict[str, object]
Message: TypeAlias = Mapping[str, object]
"""One entry of a chat, with ``role`` and ``content``."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
_END_OF_MESSAGE = "\ue000end of the last message\ue000"


_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the code of a template may raise."""


class ChatText(str):
    """Text that came out of a chat template: it has its special tokens, and ``Tokenizer.encode`` adds none."""

    __slots__ = ()


class ChatTemplates:
    """The chat templates of one model.

    Attributes:
        sources: their text by name.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: text by name (``bos_token``...), which templates may write."""
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}
        self._takes_parts: dict[Template, bool] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        chat_template: str | None,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> ChatText:
        """Write a chat as text; the arguments are those of ``Tokenizer.apply_chat_template``."""
        chat = _checked_messages(messages)
        template = self._template(chat_template, has_tools=bool(tools))
        if any(isinstance(message.get("content"), list) for message in chat) and not self._knows_parts(template):
            chat = [_joined(place, message) for place, message in enumerate(chat)]
        if continue_final_message:
            add_generation_prompt = False
            chat = _open_ended(chat)
        checked = None if tools is None else [_checked_tool(tool) for tool in tools]
        given = {**variables, "tools": checked, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._written(template, chat, given)
        except TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return ChatText(_cut_at_end_of_message(text) if continue_final_message else text)

    def _written(self, template: Template, chat: list[Json], variables: Mapping[str, object]) -> str:
        return template.render({**self._special_tokens, "documents": None, **variables, "messages": chat})

    def _knows_parts(self, template: Template) -> bool:
        """Whether a list of one text part is, for this template, that text."""
        if template not in self._takes_parts:
            forms: list[object] = ["a text", [{"type": "text", "text": "a text"}]]
            try:
                written = {self._written(template, [{"role": "user", "content": form}], {}) for form in forms}
                self._takes_parts[template] = len(written) == 1
            except _ERRORS:
                self._takes_parts[template] = False
        return self._takes_parts[template]

    def _template(self, wanted: str | None, *, has_tools: bool) -> Template:
        source = self._source(wanted, has_tools=has_tools)
        if source not in self._compiled:
            try:
                self._compiled[source] = _environment().from_string(source)
            except TemplateSyntaxError as error:
                raise ValueError(f"the chat template is not valid (line {error.lineno}): {error.message}") from error
        return self._compiled[source]

    def _source(self, wanted: str | None, *, has_tools: bool) -> str:
        if wanted is not None:
            return self.sources.get(wanted, wanted)
        if has_tools and WITH_TOOLS in self.sources:
            return self.sources[WITH_TOOLS]
        if DEFAULT in self.sources:
            return self.sources[DEFAULT]
        if self.sources:
            raise ValueError(f"the model has several chat templates; pass chat_template= one of {sorted(self.sources)}")
        raise ValueError(
            "the model has no chat template (neither chat_template.jinja nor an entry in tokenizer_config.json); "
            "pass chat_template= its text, or write the prompt yourself"
        )


def read_chat_templates(folder: Path, *configs: Json) -> dict[str, str]:
    """The templates of a model folder by name; the parsed ``configs`` count less than files of their own."""
    found: dict[str, str] = {}
    for config in configs:
        value = config.get("chat_template")
        if isinstance(value, str):
            found[DEFAULT] = value
        elif isinstance(value, list):
            named = cast("list[dict[str, str]]", value)
            found.update((entry["name"], entry["template"]) for entry in named)
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        found[DEFAULT] = main.read_text(encoding="utf-8")
    return found


# ---------------------------------------------------------------- checks


def _checked_messages(messages: object) -> list[Json]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
    chat: list[Json] = []
    for place, message in enumerate(cast("Sequence[object]", messages)):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{place}] must be a dict with role and content, not {type(message).__name__}")
        chat.append(dict(cast("Message", message)))
    return chat


def _joined(place: int, message: Json) -> Json:
    """The message with its text parts as one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in cast("list[object]", content):
        text = cast("Json", part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"the chat template of this model takes text alone, and messages[{place}] has other parts")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _checked_tool(tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool must be a dict with its JSON schema, not {type(tool).__name__}")
    return dict(cast("Message", tool))


# ---------------------------------------------------------------- continuing a message


def _open_ended(chat: list[Json]) -> list[Json]:
    """The chat with a mark at the end of its last message."""
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise ValueError("continue_final_message needs a last message whose content is text")
    return [*chat[:-1], {**chat[-1], "content": content + _END_OF_MESSAGE}]


def _cut_at_end_of_message(text: str) -> str:
    before, mark, _ = text.rpartition(_END_OF_MESSAGE)
    if not mark:
        raise ValueError("continue_final_message: the chat template does not write the last message as it is")
    return before


# ---------------------------------------------------------------- the template language


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
