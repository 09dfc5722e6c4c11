"""Writes chats as the text that a model expects, with the chat templates of its folder.

``template_language`` imports jinja2, so it is imported with the first chat.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgspec

from aioengine.api import checks
from aioengine.model_files import folder_files

if TYPE_CHECKING:
    from aioengine.tokenization.template_language import Template

Json: TypeAlias = dict[str, object]
Message: TypeAlias = Mapping[str, object]
"""One entry of a chat, with ``role`` and ``content``."""

Source: TypeAlias = str | os.PathLike[str]
"""A template as callers pass it: its text, the name of one of the model's, or the path of a file."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
MAX_TEMPLATE_BYTES: Final = 128 * 1024
MAX_NAME_BYTES: Final = 256
MAX_COMPILED: Final = 32
"""Maximum number of compiled templates in the cache. Calls may bring their own."""

VARIABLES: Final = "chat_template_kwargs"
_NOT_VARIABLES: Final = ("messages", "tools", "chat_template", "tokenize", VARIABLES)
_MARKS: Final = ("{{", "{%", "{#")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names in messages, in several programs, for the model's reasoning before its answer."""
_END_OF_MESSAGE = "\ue000end of the last message\ue000"
_SAMPLE: Final = "a sample"

_TEXT, _PARTS, _BOTH, _EITHER = "text", "parts", "both", "either"
"""The content of messages that a template supports: text; a list of parts; both; both, with the same result."""


class _Named(msgspec.Struct):
    name: str
    template: str


class ChatText(str):
    """Text that a chat template wrote. It has its special tokens already, so ``Tokenizer.encode`` adds none."""

    __slots__ = ()


class ChatTemplates:
    """The chat templates of one model.

    Attributes:
        sources: their text by name.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: their text by name (``bos_token``...). They are variables of the templates."""
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: Source | None = None,
    ) -> ChatText:
        """Write a chat as text; see ``Tokenizer.apply_chat_template``.

        ``variables`` may contain its switches ``add_generation_prompt`` and ``continue_final_message``.
        """
        plain = {name: _plain(f"the chat template variable {name!r}", value) for name, value in variables.items()}
        is_prompt = checks.switch("add_generation_prompt", plain.pop("add_generation_prompt", True))
        is_open = checks.switch("continue_final_message", plain.pop("continue_final_message", False))
        chat = [_normalized(message) for message in _checked_messages(messages)]
        template = compiled(self._source(chat_template, has_tools=bool(tools)))
        form = self._content_form(template)
        if form != _EITHER:
            chat = [_joined(place, message, keeps_images=form != _TEXT) for place, message in enumerate(chat)]
        if is_open:
            content = chat[-1].get("content") if chat else None
            if not isinstance(content, str):
                raise ValueError("continue_final_message needs a last message whose content is text")
            chat[-1] = {**chat[-1], "content": content + _END_OF_MESSAGE}
        for message in chat:
            if form == _PARTS and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        plain["tools"] = None if tools is None else [_checked_tool(tool) for tool in tools]
        plain["add_generation_prompt"] = is_prompt and not is_open
        text = self._written(template, chat, plain)
        if is_open:
            text, mark, _ = text.rpartition(_END_OF_MESSAGE)
            if not mark:
                raise ValueError("continue_final_message: the chat template does not write the last message as it is")
        return ChatText(text)

    def _written(self, template: Template, chat: list[Json], variables: Mapping[str, object]) -> str:
        return template.render({**self._special_tokens, "documents": None, **variables, "messages": chat})

    def _content_form(self, template: Template) -> str:
        """Return the content that the template supports, from a trial with one text."""
        if template.content is None:
            forms: list[object] = [_SAMPLE, [{"type": "text", "text": _SAMPLE}]]
            text, parts = (self._tried(template, form) for form in forms)
            if text == parts:
                template.content = _EITHER
            elif _SAMPLE not in parts or "'type'" in parts:  # it ignores parts, or prints the list
                template.content = _TEXT
            else:
                template.content = _BOTH if _SAMPLE in text else _PARTS
        return template.content

    def _tried(self, template: Template, content: object) -> str:
        try:
            return self._written(template, [{"role": "user", "content": content}], {})
        except ValueError:
            return ""

    def _source(self, wanted: Source | None, *, has_tools: bool) -> str:
        if isinstance(wanted, str):
            if wanted not in self.sources and not is_text(wanted):
                names = ", ".join(sorted(self.sources)) or "it has none"
                raise ValueError(
                    f"chat_template={checks.shown(wanted)} is neither the text of a template (it has no {{{{ or {{%) "
                    f"nor the name of one of the model's ({names}); a file is given as a pathlib.Path"
                )
            return self.sources.get(wanted, wanted)
        if wanted is not None:
            return read_template(wanted)
        name = WITH_TOOLS if has_tools and WITH_TOOLS in self.sources else DEFAULT
        if name in self.sources:
            return self.sources[name]
        if self.sources:
            raise ValueError(f"the model has several chat templates; pass chat_template= one of {sorted(self.sources)}")
        raise ValueError("the model has no chat template; pass chat_template= to the engine, or write the prompt")


def is_text(source: str) -> bool:
    """Whether this is the text of a template, not a name or a path."""
    return any(mark in source for mark in _MARKS)


def read_template(path: Source) -> str:
    """Return the template in a file. Raises ValueError if it does not exist, cannot be read, or is too large."""
    try:
        text = folder_files.read_text(Path(path), MAX_TEMPLATE_BYTES)
    except ValueError as error:
        raise ValueError(f"chat_template: {error}") from error
    if text is None:
        raise ValueError(f"chat_template={checks.shown(os.fspath(path))} cannot be read: there is no such file")
    return text


def checked_template(source: str) -> str:
    """Return the text of a template, from its text or its path. Raises ValueError if it cannot be compiled."""
    text = source if is_text(source) else read_template(source)
    compiled(text)
    return text


@lru_cache(MAX_COMPILED)
def compiled(source: str) -> Template:
    """Compile a template. Raises ValueError if it is not valid, or too large."""
    from aioengine.tokenization.template_language import Template

    return Template(checks.text("the chat template", source, max_bytes=MAX_TEMPLATE_BYTES))


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a model folder by name. A template file replaces the entry of a JSON file.

    Raises ValueError if a file cannot be read, or an entry is not a template.
    """
    templates: dict[str, str] = {}
    for path in (folder / folder_files.TOKENIZER_CONFIG, folder / "chat_template.json"):
        value = folder_files.read_object(path).get("chat_template")
        if isinstance(value, str):
            templates[DEFAULT] = value
        elif value is not None:
            try:
                templates |= {entry.name: entry.template for entry in msgspec.convert(value, list[_Named])}
            except msgspec.ValidationError as error:
                kinds = "a text, or a list of objects with name and template"
                raise ValueError(f"chat_template in {str(path)!r} must be {kinds}: {error}") from error
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, path in {**files, DEFAULT: folder / "chat_template.jinja"}.items():
        text = folder_files.read_text(path, MAX_TEMPLATE_BYTES)
        if text is not None:
            templates[name] = text
    return templates


def check_files(folder: Path) -> None:
    """Check tokenizer.json and related files before the start. Raises ValueError, which names the file.

    The tokenizers library makes more checks when it reads the file, while the processes start.
    """
    if not folder_files.is_gguf(folder):
        folder_files.read_tokenizer(folder / folder_files.TOKENIZER)
    folder_files.added_texts(folder)
    read_chat_templates(folder)


# ---------------------------------------------------------------- checks


def template_variables(keywords: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords of a call that are variables of its template, with the entries of ``chat_template_kwargs``.

    Raises:
        TypeError: ``chat_template_kwargs`` is not a dict with strings as keys.
        ValueError: a variable has the name of another argument, or is given twice.
    """
    variables = dict(keywords)
    more = variables.pop(VARIABLES, None)
    if more is None:
        return variables
    for key, value in checks.mapping(VARIABLES, more, allowed="a dict of variables for the chat template").items():
        name = checks.text(f"{VARIABLES} keys", key, max_bytes=MAX_NAME_BYTES)
        if name in _NOT_VARIABLES:
            raise ValueError(f"{VARIABLES} has {name!r}, which is not a variable of a chat template")
        if name in variables:
            raise ValueError(f"{name} is given twice, by itself and in {VARIABLES}")
        variables[name] = value
    return variables


def _checked_messages(messages: object) -> list[Json]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of dicts with role and content, not {type(messages).__name__}")
    chat: list[Json] = []
    for place, message in enumerate(cast("Sequence[object]", messages)):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{place}] must be a dict with role and content, not {type(message).__name__}")
        chat.append(dict(cast("Message", message)))
    return chat


def _joined(place: int, message: Json, *, keeps_images: bool) -> Json:
    """Join the text parts of a message. A message with images stays unchanged if ``keeps_images``, or is an error."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in cast("list[object]", content):
        text = cast("Json", part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            if keeps_images:
                return message
            raise ValueError(f"the chat template of this model accepts only text; messages[{place}] has other parts")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _checked_tool(tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool must be a dict with its JSON schema, not {type(tool).__name__}")
    return cast("Json", _plain("tools", cast("Message", tool)))


def _normalized(message: Json) -> Json:
    """Return a message as transformers passes it to templates: without None, and with the reasoning under two names."""
    plain = cast("Json", _plain("messages", message))
    entries = {name: value for name, value in plain.items() if value is not None}
    reasoning = next((entries[name] for name in _REASONING if name in entries), None)
    return entries if reasoning is None else {"thinking": reasoning, **entries, "reasoning_content": reasoning}


def _plain(name: str, value: object) -> object:
    """Copy JSON data. A template must not get objects of the program, because it could call their methods.

    Raises:
        TypeError: it contains other objects.
        ValueError: it is nested too deeply.
    """

    def as_dict(part: object) -> object:
        if isinstance(part, Mapping):
            return dict(cast("Message", part))
        raise checks.wrong_type(name, "made of dicts, lists, text, numbers, True, False and None", part)

    try:
        return json.loads(json.dumps(value, default=as_dict))
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is nested too deeply, or contains itself") from None
