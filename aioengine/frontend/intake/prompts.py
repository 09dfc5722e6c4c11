"""Checks prompts, and the arguments of ``chat`` for chat templates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast
from uuid import uuid4

from msgspec import Struct, ValidationError, convert

from aioengine.api import checks
from aioengine.frontend.intake.pooling import Pooled  # a field of a Struct
from aioengine.media.intake.sources import ImageSource, part_source
from aioengine.tokenization.chat_template import MAX_TEMPLATE_BYTES, VARIABLES, template_variables

if TYPE_CHECKING:
    from aioengine.protocol.messages import Media

Messages = Sequence[Mapping[str, object]]
"""A conversation: dicts with ``role`` and ``content``, as chat templates read them."""

PromptError = ValueError | TypeError
"""The error of a wrong prompt. It replaces the prompt if rows fail alone (``return_exceptions=True``)."""

IDS: Final = "a list of token ids"
MESSAGES: Final = "a list of dicts with role and content"

MAX_CHARACTERS: Final = 256 * 1024
"""Upper limit of the characters counted for tools and variables. Larger ones count as this many."""

CHAT_ARGUMENTS: Final = ("chat_template", VARIABLES, "enable_thinking", "tools")
MAX_TOOLS: Final = 1024

_THINKING: Final = "enable_thinking"


class EncodeRules(Struct, frozen=True, gc=False):
    """Options of the tokenization. ``add_special_tokens`` None: for a text, not for a chat. ``keep_last``: number of
    ids at the end of the prompt that are kept; None: all.
    """

    add_special_tokens: bool | None = None
    keep_last: int | None = None


DEFAULT_RULES: Final = EncodeRules()


class TextPrompt(Struct, frozen=True, gc=False):
    """A text. ``num_bytes``: its size in UTF-8."""

    text: str
    num_bytes: int
    rules: EncodeRules = DEFAULT_RULES


class IdsPrompt(Struct, frozen=True, gc=False):
    """Token ids, or the placeholder ids of embeddings."""

    token_ids: list[int]

    @property
    def num_bytes(self) -> int:
        """The size of the list, or of the embeddings."""
        return len(self.token_ids.embeds) if isinstance(self.token_ids, EmbedsIds) else 8 * len(self.token_ids)


class EmbedsIds(list[int]):
    """The placeholder ids of a prompt of embeddings: one 0 per embedding.

    Attributes:
        width: size of an embedding. embeds: all embeddings as fp32. salt: random, so that no prefix is shared.
    """

    def __init__(self, num_tokens: int, width: int, embeds: bytes) -> None:
        super().__init__([0] * num_tokens)
        self.width = width
        self.embeds = embeds
        self.salt = uuid4().hex


class MediaIds(list[int]):
    """The ids of a prompt with its images in place.

    Attributes:
        media: its images.
    """

    def __init__(self, ids: Sequence[int], media: list[Media]) -> None:
        super().__init__(ids)
        self.media = media

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_features for image in self.media)


class TemplateOptions(Struct, frozen=True):
    """The arguments of ``chat`` for its template.

    template: text, name or file of the chat template; None: the default template of the model.
    num_characters: approximate size of the tools and variables.
    """

    template: str | os.PathLike[str] | None = None
    tools: list[dict[str, object]] | None = None
    variables: dict[str, object] = {}
    num_characters: int = 0


class ChatPrompt(Struct, frozen=True):
    """A conversation, which is rendered by a chat template, then tokenized without special tokens.

    ``num_bytes``: approximate size of its text and its images. ``images``: the images of its parts; None: the image is
    in ``image_data``.
    """

    messages: list[dict[str, object]]
    num_bytes: int
    options: TemplateOptions = TemplateOptions()
    rules: EncodeRules = DEFAULT_RULES
    images: tuple[ImageSource | None, ...] = ()


class ChatIds(list[int]):
    """The ids of a conversation that has images.

    Attributes:
        images: in the order of its placeholders; None: the image is in ``image_data``.
    """

    def __init__(self, ids: Sequence[int], images: tuple[ImageSource | None, ...]) -> None:
        super().__init__(ids)
        self.images = images


class PooledPrompt(Struct, frozen=True, gc=False):
    """A text to pool, or a pair of texts to compare."""

    first: TextPrompt
    second: TextPrompt | None
    options: Pooled

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + (0 if self.second is None else self.second.num_bytes)


CheckedPrompt = TextPrompt | ChatPrompt | IdsPrompt | PooledPrompt


def encode_rules(options: Mapping[str, object]) -> EncodeRules:
    """Return the options of the tokenization. Raises TypeError or ValueError."""
    specials, keep_last = options.get("add_special_tokens"), options.get("truncate_prompt_tokens")
    return EncodeRules(
        None if specials is None else checks.switch("add_special_tokens", specials),
        None if keep_last is None else checks.whole("truncate_prompt_tokens", keep_last, 1),
    )


def text_prompt(name: str, value: object, rules: EncodeRules = DEFAULT_RULES) -> TextPrompt:
    """Return a text prompt.

    Raises:
        TypeError, ValueError: the value is not a string, is empty, or has lone surrogates.
    """
    value = checks.plain(value)
    if not isinstance(value, str):
        if isinstance(value, Mapping) and "role" in value:
            raise checks.wrong_type(name, "a string (messages with a role are given to chat)", value)
        is_id = isinstance(value, int) and not isinstance(value, bool)
        raise checks.wrong_type(name, "a string (token ids are given as input_ids)" if is_id else "a string", value)
    if not value:
        raise ValueError(f"{name} is empty; give at least one character, or input_ids")
    try:
        return TextPrompt(value, len(value) if value.isascii() else len(value.encode()), rules)
    except UnicodeEncodeError as error:
        text = f"{name} has a lone surrogate at position {error.start}, which is no character"
        raise ValueError(text) from None


def pooled_prompt(name: str, value: object, *, options: Pooled) -> PooledPrompt:
    """Return a text to pool. It may be empty, because special tokens are added."""
    return PooledPrompt(_any_text(name, value), None, options)


def pair_prompt(name: str, value: object, *, options: Pooled, query: str | None = None) -> PooledPrompt:
    """Return a query and a document. ``value`` is both, or the document if ``query`` is given.

    Raises:
        TypeError, ValueError: the value is not a pair of texts.
    """
    if query is None:
        pair = checks.sequence(name, value, allowed="a pair [query, document]")
        if len(pair) != 2:
            raise ValueError(f"{name} must be a pair [query, document], got {len(pair)} entries")
        first, second = pair
    else:
        first, second = query, value
    return PooledPrompt(_any_text(name, first), _any_text(name, second), options)


def _any_text(name: str, value: object) -> TextPrompt:
    if not isinstance(value, str):
        raise checks.wrong_type(name, "a string", value)
    return text_prompt(name, value) if value else TextPrompt("", 0)


def ids_prompt(
    name: str, value: object, rules: EncodeRules = DEFAULT_RULES, *, may_be_empty: bool = False
) -> IdsPrompt:
    """Return a prompt of ids (any kind of integer). Ids outside the vocabulary are refused later.

    Raises:
        TypeError, ValueError: the value is not a list of ids, or empty.
    """
    if rules.add_special_tokens:
        raise ValueError(f"add_special_tokens=True works only for text; put the special token ids into {name}")
    entries = checks.sequence(name, value, allowed=IDS)
    if not entries and not may_be_empty:
        raise ValueError(f"{name} is empty; give at least one token id")
    if rules.keep_last is not None:
        entries = entries[-rules.keep_last :]
    try:
        return convert({"token_ids": entries}, IdsPrompt)  # a fast copy, if all are plain integers
    except ValidationError:
        return IdsPrompt([checks.whole(f"{name} entries", entry, 0) for entry in entries])


def chat_prompt(
    name: str, value: object, *, options: TemplateOptions, rules: EncodeRules = DEFAULT_RULES
) -> ChatPrompt:
    """Return a conversation.

    Raises:
        TypeError, ValueError: the value is not a list of messages, or empty, or a message is wrong.
    """
    entries = checks.sequence(name, value, allowed=MESSAGES)
    if not entries:
        raise ValueError(f"{name} is empty; give at least one dict with role and content")
    images: list[ImageSource | None] = []
    messages = [_message(f"{name}[{position}]", entry, images) for position, entry in enumerate(entries)]
    try:
        num_bytes = _num_characters(messages) + options.num_characters
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or holds itself; give plain text parts") from None
    num_bytes += sum(image.num_bytes for image in images if image is not None)
    return ChatPrompt(messages, num_bytes, options, rules, tuple(images))


def _message(name: str, value: object, images: list[ImageSource | None]) -> dict[str, object]:
    """Return a message with role and content (text, parts, or None for tool calls and assistants).

    Its images are added to ``images``.
    """
    message = _with_plain_keys(checks.mapping(name, value, allowed="a dict with role and content"))
    if message.get("role") is None:
        raise ValueError(f"{name} has no role, got {checks.shown(message)}")
    role = message["role"] = checks.text(f"the role of {name}", message["role"])
    content = message.get("content")
    if content is None:
        is_silent = role == "assistant" and "content" in message
        if not message.get("tool_calls") and not is_silent:
            raise ValueError(f"{name} has no content, got {checks.shown(message)}")
    elif isinstance(content, list | tuple):
        parts = cast("Sequence[object]", checks.plain(cast("object", content)))
        message["content"] = [_part(f"part {index} of {name}", part, images) for index, part in enumerate(parts)]
    elif isinstance(content, str):
        message["content"] = checks.text(f"the content of {name}", content)
    else:
        raise checks.wrong_type(f"the content of {name}", "a string or a list of parts", content)
    return message


def _part(name: str, value: object, images: list[ImageSource | None]) -> dict[str, object]:
    """Return a part of a message: text, or an image. The template sees only that there is an image."""
    part = _with_plain_keys(checks.mapping(name, value, allowed='a dict such as {"type": "text", "text": "..."}'))
    kind = checks.plain(part.get("type"))
    if kind in ("image", "image_url"):
        images.append(part_source(name, part | {"type": kind}))
        return {"type": "image"}
    if kind != "text":
        raise ValueError(f"{name} is of type {checks.shown(part.get('type'))}; allowed: text, image, image_url")
    return part | {"type": "text", "text": checks.text(f"the text of {name}", part.get("text"))}


def _with_plain_keys(value: Mapping[object, object]) -> dict[str, object]:
    """Return a copy whose keys are plain strings, also if they are members of an enumeration."""
    return {cast("str", checks.plain(key)): entry for key, entry in value.items()}


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, cast("Mapping[object, object]", value).values()))
    return sum(map(_num_characters, cast("list[object]", value))) if isinstance(value, list) else 0


# ---------------------------------------------------------------- arguments about the chat template


def template_options(options: Mapping[str, object]) -> TemplateOptions:
    """Return the arguments of ``chat`` for its template. Files and nested data of tools are read later.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    arguments = {name: options[name] for name in CHAT_ARGUMENTS if options.get(name) is not None}
    if not arguments:
        return TemplateOptions()
    variables = template_variables({name: arguments[name] for name in (VARIABLES, _THINKING) if name in arguments})
    if _THINKING in variables:
        checks.switch(_THINKING, variables[_THINKING])
    tools = _tools(arguments["tools"]) if "tools" in arguments else None
    num_characters = checks.json_size([tools, variables], MAX_CHARACTERS)
    return TemplateOptions(_source(arguments.get("chat_template")), tools, variables, num_characters)


def _source(value: object) -> str | os.PathLike[str] | None:
    """Check the chat template. A string is never a path: it may come from a client, who must not read files."""
    if value is None or isinstance(value, os.PathLike):
        return cast("os.PathLike[str] | None", value)
    if not isinstance(value, str):
        raise checks.wrong_type("chat_template", "the text or the name of a chat template, or a pathlib.Path", value)
    return checks.text("chat_template", value, max_bytes=MAX_TEMPLATE_BYTES)


def _tools(value: object) -> list[dict[str, object]]:
    entries = checks.items("tools", value, MAX_TOOLS, allowed="a list of dicts in JSON schema form")
    tools = [
        dict(checks.mapping(f"tools[{index}]", tool, allowed="a dict in JSON schema form"))
        for index, tool in enumerate(entries)
    ]
    return cast("list[dict[str, object]]", tools)
