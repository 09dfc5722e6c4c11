"""Chats as the text that a model expects, by the templates of its folder.

``template_language`` is what they are written in; it is imported with the first chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.template_language import Template

Json: TypeAlias = dict[str, object]
Message: TypeAlias = Mapping[str, object]
"""One entry of a chat, with ``role`` and ``content``."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
_END_OF_MESSAGE = "\ue000end of the last message\ue000"


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
        text = self._written(template, chat, given)
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
            except ValueError:
                self._takes_parts[template] = False
        return self._takes_parts[template]

    def _template(self, wanted: str | None, *, has_tools: bool) -> Template:
        source = self._source(wanted, has_tools=has_tools)
        if source not in self._compiled:
            from aioengine.template_language import Template

            self._compiled[source] = Template(source)
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
