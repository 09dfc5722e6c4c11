"""Writes chats as the text that a model expects, by the chat templates of its folder.

``template_language`` imports jinja2, so it is imported with the first chat.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgspec

from aioengine.api import checks
from aioengine.model_files import folder_files
from aioengine.tokenization.tokenizer_limits import read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioengine.tokenization.template_language import Template

Json: TypeAlias = dict[str, object]
Message: TypeAlias = Mapping[str, object]
"""One entry of a chat, with ``role`` and ``content``."""

Source: TypeAlias = str | os.PathLike[str]
"""A template as callers give it: its text, or the path of a file."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
MAX_TEMPLATE_BYTES: Final = 128 * 1024
MAX_NAME_BYTES: Final = 256
MAX_VALUES: Final = 200_000
"""Of the messages, of the tools, and of each variable; a value that is held twice counts twice."""
MAX_COMPILED: Final = 32
"""The number of compiled templates that are kept: calls may bring their own."""

VARIABLES: Final = "chat_template_kwargs"
_NOT_VARIABLES: Final = ("messages", "tools", "chat_template", "tokenize", VARIABLES)
_MARKS: Final = ("{{", "{%", "{#")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names that several programs give to a model's thoughts before its answer, in messages."""
_END_OF_MESSAGE = "\ue000end of the last message\ue000"


_SAMPLE: Final = "a sample"


_TEXT, _PARTS, _BOTH, _EITHER = "text", "parts", "both", "either"
"""The content of messages that a template writes: text, a list of parts, or both, and whether both the same way."""


class _Named(msgspec.Struct):
    name: str
    template: str


class ChatText(str):
    """Text written by a chat template: it has its special tokens, so ``Tokenizer.encode`` adds none."""

    __slots__ = ()


class ChatTemplates:
    """The chat templates of one model.

    Attributes:
        sources: their text by name.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: the text of each by its name (``bos_token``...); they are variables of the templates."""
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        chat_template: Source | None,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> ChatText:
        """Write a chat as text; the arguments are those of ``Tokenizer.apply_chat_template``.

        ``variables`` may hold the two switches, too.
        """
        plain = {name: _plain(f"the chat template variable {name!r}", value) for name, value in variables.items()}
        add_generation_prompt = _switch(plain, "add_generation_prompt", add_generation_prompt)
        continue_final_message = _switch(plain, "continue_final_message", continue_final_message)
        chat = [_normalized(message) for message in _checked_messages(messages)]
        template = self._template(chat_template, has_tools=bool(tools))
        writes = self._writes(template)
        if writes != _EITHER and any(isinstance(message.get("content"), list) for message in chat):
            keeps_images = writes != _TEXT
            chat = [_joined(place, message, keeps_images=keeps_images) for place, message in enumerate(chat)]
        if continue_final_message:
            add_generation_prompt = False
            chat = _open_ended(chat)
        if writes == _PARTS:
            chat = [_in_parts(message) for message in chat]
        checked = None if tools is None else [_checked_tool(tool) for tool in tools]
        given = {**plain, "tools": checked, "add_generation_prompt": add_generation_prompt}
        text = self._written(template, chat, given)
        return ChatText(_cut_at_end_of_message(text) if continue_final_message else text)

    def _written(self, template: Template, chat: list[Json], variables: Mapping[str, object]) -> str:
        return template.render({**self._special_tokens, "documents": None, **variables, "messages": chat})

    def _writes(self, template: Template) -> str:
        """The form of content that the template writes, tried with one text."""
        if template.content is None:
            forms: list[object] = [_SAMPLE, [{"type": "text", "text": _SAMPLE}]]
            text, parts = (self._tried(template, form) for form in forms)
            if text == parts:
                template.content = _EITHER
            elif _SAMPLE not in parts or "'type'" in parts:  # it does not know them, or writes them as they are
                template.content = _TEXT
            else:
                template.content = _BOTH if _SAMPLE in text else _PARTS
        return template.content

    def _tried(self, template: Template, content: object) -> str:
        try:
            return self._written(template, [{"role": "user", "content": content}], {})
        except ValueError:
            return ""

    def _template(self, wanted: Source | None, *, has_tools: bool) -> Template:
        source = self._source(wanted, has_tools=has_tools)
        template = self._compiled.get(source)
        if template is None:
            while len(self._compiled) >= MAX_COMPILED:
                self._compiled.pop(next(iter(self._compiled)), None)
            template = self._compiled[source] = compiled(source)
        return template

    def _source(self, wanted: Source | None, *, has_tools: bool) -> str:
        if isinstance(wanted, str):
            if wanted in self.sources:
                return self.sources[wanted]
            if not is_text(wanted):
                names = ", ".join(sorted(self.sources)) or "it has none"
                raise ValueError(
                    f"chat_template={checks.shown(wanted)} is neither the text of a template (it has no {{{{ or {{%) "
                    f"nor the name of one of the model's ({names}); a file is given as a pathlib.Path"
                )
            return wanted
        if wanted is not None:
            return read_template(wanted)
        if has_tools and WITH_TOOLS in self.sources:
            return self.sources[WITH_TOOLS]
        if DEFAULT in self.sources:
            return self.sources[DEFAULT]
        if self.sources:
            raise ValueError(f"the model has several chat templates; pass chat_template= one of {sorted(self.sources)}")
        raise ValueError(
            "the model has no chat template (neither chat_template.jinja nor an entry in tokenizer_config.json); "
            "pass chat_template= its text or its file to the engine, or write the prompt yourself"
        )


def is_text(source: str) -> bool:
    """Whether this is the text of a template, and not a name or a path."""
    return any(mark in source for mark in _MARKS)


def read_template(path: Source) -> str:
    """The template in a file.

    Raises:
        ValueError: the file does not exist, cannot be read, or is too large.
    """
    try:
        text = folder_files.read_text(Path(path), MAX_TEMPLATE_BYTES)
    except ValueError as error:
        raise ValueError(f"chat_template: {error}") from error
    if text is None:
        raise ValueError(f"chat_template={checks.shown(os.fspath(path))} cannot be read: there is no such file")
    return text


def checked_template(source: str) -> str:
    """The text of a template that was given as text or as a path; it can be compiled.

    Raises:
        ValueError: it is neither, or the template is not valid.
    """
    text = source if is_text(source) else read_template(source)
    compiled(text)
    return text


def compiled(source: str) -> Template:
    """The compiled template. Raises ValueError if it is not valid, or too large."""
    from aioengine.tokenization.template_language import Template

    return Template(checks.text("the chat template", source, max_bytes=MAX_TEMPLATE_BYTES))


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The templates of a model folder by name. A file of its own counts more than an entry of a JSON file.

    Raises:
        ValueError: one of the files cannot be read, or has no template in the place of one.
    """
    found: dict[str, str] = {}
    for path in (folder / folder_files.TOKENIZER_CONFIG, folder / "chat_template.json"):
        found |= _templates_in(path)
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, path in {**files, DEFAULT: folder / "chat_template.jinja"}.items():
        text = folder_files.read_text(path, MAX_TEMPLATE_BYTES)
        if text is not None:
            found[name] = text
    return found


def _templates_in(path: Path) -> dict[str, str]:
    """The templates in a JSON file: one text, or a list of named ones."""
    value = folder_files.read_object(path).get("chat_template")
    if value is None or isinstance(value, str):
        return {} if value is None else {DEFAULT: value}
    try:
        named = msgspec.convert(value, list[_Named])
    except msgspec.ValidationError as error:
        raise ValueError(
            f"chat_template in {str(path)!r} must be a text, or a list of objects with name and template: {error}"
        ) from error
    return {entry.name: entry.template for entry in named}


def check_files(folder: Path) -> None:
    """Check tokenizer.json and the files beside it before anything is started. Raises ValueError, which names the file.

    The tokenizers library finds more faults. It reads the file while the processes start.
    """
    if not folder_files.is_gguf(folder):
        read_tokenizer(folder / folder_files.TOKENIZER)
    folder_files.added_texts(folder)
    read_chat_templates(folder)


# ---------------------------------------------------------------- checks


def template_variables(keywords: Mapping[str, object]) -> dict[str, object]:
    """The keywords of a call that are variables of its template, with the entries of ``chat_template_kwargs``.

    Raises:
        TypeError: ``chat_template_kwargs`` is no dict with names for keys.
        ValueError: a variable has the name of another argument, or is given twice.
    """
    found = dict(keywords)
    more = found.pop(VARIABLES, None)
    if more is None:
        return found
    if not isinstance(more, Mapping):
        raise checks.wrong_type(VARIABLES, "a dict of variables for the chat template", more)
    for key, value in cast("Mapping[object, object]", more).items():
        name = checks.text(f"{VARIABLES} keys", key, max_bytes=MAX_NAME_BYTES)
        if name in _NOT_VARIABLES:
            raise ValueError(f"{VARIABLES} has {name!r}, which is no variable of a chat template")
        if name in found:
            raise ValueError(f"{name} is given twice, by itself and in {VARIABLES}")
        found[name] = value
    return found


def _switch(variables: dict[str, object], name: str, given: bool) -> bool:
    return checks.switch(name, variables.pop(name, given))


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
    """The message with its text parts as one text; with ``keeps_images`` only where all of its parts are text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in cast("list[object]", content):
        text = cast("Json", part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            if keeps_images:
                return message
            raise ValueError(
                f"the chat template of this model accepts only text, and messages[{place}] has other parts"
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _in_parts(message: Json) -> Json:
    """The message with its text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _checked_tool(tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool must be a dict with its JSON schema, not {type(tool).__name__}")
    return cast("Json", _plain("tools", cast("Message", tool)))


def _normalized(message: Json) -> Json:
    """The message as transformers gives it to templates: without None values, and with thoughts under two names."""
    plain = cast("Json", _plain("messages", message))
    found = {name: value for name, value in plain.items() if value is not None}
    thought = next((found[name] for name in _REASONING if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _plain(name: str, value: object) -> object:
    """A copy of JSON data: a template must get no object of the program, whose methods it could call.

    Raises:
        TypeError: it holds anything else.
        ValueError: it is nested too deeply, or has too many values.
    """
    try:
        return _copied(name, value, count(1))
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or holds itself") from None


def _copied(name: str, value: object, numbers: Iterator[int]) -> object:
    if next(numbers) > MAX_VALUES:
        raise ValueError(f"{name} has more than {MAX_VALUES} values")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # also an enum of strings: not its methods
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        given = cast("Mapping[object, object]", value)
        return {cast("str", _copied(name, key, numbers)): _copied(name, entry, numbers) for key, entry in given.items()}
    if isinstance(value, list | tuple):
        entries = [_copied(name, entry, numbers) for entry in cast("Sequence[object]", value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    raise checks.wrong_type(name, "made of dicts, lists, text, numbers, True, False and None", value)


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
