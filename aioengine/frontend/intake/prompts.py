"""Checks prompts at the call, and the arguments of ``chat`` for chat templates.

Checking all of a very large prompt would block the caller's event loop. The tokenizer's thread does that later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self, cast
from uuid import uuid4

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

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

MAX_IDS_AT_CALL: Final = 64 * 1024
CHARACTERS_PER_ID: Final = 4
IDS_PER_MESSAGE: Final = 256
MAX_CHARACTERS_AT_CALL: Final = CHARACTERS_PER_ID * MAX_IDS_AT_CALL
MAX_MESSAGES_AT_CALL: Final = MAX_IDS_AT_CALL // IDS_PER_MESSAGE
"""Limits for the checks at the call, for all its prompts. A message takes as long as ``IDS_PER_MESSAGE`` ids."""

NUM_SAMPLED_MESSAGES: Final = 16
BYTES_PER_PART: Final = 256
"""Memory of the dict of a message, or of a part of a message."""

IDS_IN_SLICE: Final = 16 * 1024
MESSAGES_IN_SLICE: Final = 64

CHAT_ARGUMENTS: Final = ("chat_template", VARIABLES, "enable_thinking", "tools")
MAX_TOOLS: Final = 1024

_THINKING: Final = "enable_thinking"


class CheckBudget(Struct):
    """The amount that the call checks now, in token ids."""

    num_left: int = MAX_IDS_AT_CALL

    def covers(self, num_ids: int) -> bool:
        """Whether to check a prompt of this size now. A prompt that is too large uses up the budget."""
        self.num_left -= num_ids
        return self.num_left >= 0


class EncodeRules(Struct, frozen=True, gc=False):
    """Options of the tokenization. ``add_special_tokens`` None: for a text, not for a chat. ``keep_last``: number of
    ids at the end of the prompt that are kept; None: all.
    """

    add_special_tokens: bool | None = None
    keep_last: int | None = None


DEFAULT_RULES: Final = EncodeRules()


class TextPrompt(Struct, frozen=True, gc=False):
    """A text. ``num_bytes``: its size in UTF-8, or a lower bound until ``is_checked``."""

    text: str
    num_bytes: int
    name: str = ""
    is_checked: bool = True
    rules: EncodeRules = DEFAULT_RULES

    def checked(self) -> Self:
        """Count the bytes, and raise ValueError for lone surrogates."""
        num_bytes = 0
        for start in range(0, len(self.text), MAX_CHARACTERS_AT_CALL):
            if start:
                _let_others_run()
            try:
                num_bytes += len(self.text[start : start + MAX_CHARACTERS_AT_CALL].encode())
            except UnicodeEncodeError as error:
                position = start + error.start
                raise ValueError(
                    f"{self.name} has a lone surrogate at position {position}, which is no character: "
                    f"{checks.shown(self.text[max(0, position - 10) : position + 10])}"
                ) from None
        return replace(self, num_bytes=num_bytes, name="", is_checked=True)


class IdsPrompt(Struct, frozen=True):
    """Token ids. ``ids``: the caller's object, or a new list of integers once ``is_checked``."""

    ids: object
    name: str = ""
    is_checked: bool = True

    @property
    def token_ids(self) -> list[int]:
        return cast("list[int]", self.ids)

    @property
    def num_ids(self) -> int:
        return checks.num_items(self.ids)

    @property
    def num_bytes(self) -> int:
        """The size of the list."""
        return 8 * self.num_ids

    def checked(self) -> IdsPrompt:
        """Convert all ids to plain integers. Raises TypeError or ValueError for other values."""
        token_ids: list[int] = []
        for start in range(0, self.num_ids, IDS_IN_SLICE):
            if start:
                _let_others_run()
            part = checks.sequence(self.name, _slice(self.name, self.ids, start, start + IDS_IN_SLICE), allowed=IDS)
            try:
                token_ids += convert(part, list[int])  # fast, if all are plain integers
            except ValidationError:
                token_ids += [checks.whole(f"{self.name} entries", entry, 0) for entry in part]
        return IdsPrompt(token_ids)


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

    ``num_bytes``: approximate characters of its text. Until ``is_checked``: those of a sample, and the memory of its
    objects. ``images``: the images of its parts, once ``is_checked``; None: the image is in ``image_data``.
    """

    messages: Messages
    num_bytes: int
    options: TemplateOptions = TemplateOptions()
    name: str = ""
    is_checked: bool = True
    rules: EncodeRules = DEFAULT_RULES
    images: tuple[ImageSource | None, ...] = ()

    def checked(self) -> ChatPrompt:
        """Check every message. Raises TypeError or ValueError if one is wrong."""
        messages: list[dict[str, object]] = []
        images: list[ImageSource | None] = []
        for position, message in enumerate(self.messages):
            if position % MESSAGES_IN_SLICE == MESSAGES_IN_SLICE - 1:
                _let_others_run()
            messages.append(_message(f"{self.name}[{position}]", message, images))
        try:
            num_characters = _num_characters(messages) + self.options.num_characters
        except RecursionError:
            raise ValueError(f"{self.name} is nested too deeply, or holds itself; give plain text parts") from None
        num_bytes = num_characters + sum(image.num_bytes for image in images if image is not None)
        return replace(self, messages=messages, num_bytes=num_bytes, name="", is_checked=True, images=tuple(images))


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
    def name(self) -> str:
        return self.first.name

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + (0 if self.second is None else self.second.num_bytes)

    @property
    def is_checked(self) -> bool:
        return self.first.is_checked and (self.second is None or self.second.is_checked)

    def checked(self) -> PooledPrompt:
        """Check both texts, as ``TextPrompt``."""
        second = self.second
        return PooledPrompt(self.first.checked(), None if second is None else second.checked(), self.options)


Prompt = TextPrompt | ChatPrompt | IdsPrompt | PooledPrompt
"""The prompt of a row. Until ``is_checked``, the tokenizer's thread must call ``checked()``."""


def _slice(name: str, ids: object, start: int, stop: int | None = None) -> object:
    """Return some entries of a list, tuple or array. An array is cut before it is converted, which may take long."""
    # A protocol is slow to check: 20 to 50 microseconds for a list.
    if not isinstance(ids, list | tuple) and isinstance(ids, checks.Array) and hasattr(ids, "__getitem__"):
        return cast("Sequence[object]", ids)[start:stop]
    return checks.sequence(name, ids, allowed=IDS)[start:stop]


def _let_others_run() -> None:
    """Release the GIL for a waiting thread, which would otherwise wait for 5 ms."""
    time.sleep(0)


def encode_rules(options: Mapping[str, object]) -> EncodeRules:
    """Return the options of the tokenization. Raises TypeError or ValueError."""
    specials, keep_last = options.get("add_special_tokens"), options.get("truncate_prompt_tokens")
    return EncodeRules(
        None if specials is None else checks.switch("add_special_tokens", specials),
        None if keep_last is None else checks.whole("truncate_prompt_tokens", keep_last, 1),
    )


def text_prompt(name: str, value: object, budget: CheckBudget, rules: EncodeRules = DEFAULT_RULES) -> TextPrompt:
    """Return a text prompt. All its characters are checked now if ``budget`` covers them, otherwise later.

    Raises:
        TypeError, ValueError: the value is not a string, or empty.
    """
    value = checks.plain(value)
    if not isinstance(value, str):
        if isinstance(value, Mapping) and "role" in value:
            raise checks.wrong_type(name, "a string (messages with a role are given to chat)", value)
        is_id = isinstance(value, int) and not isinstance(value, bool)
        raise checks.wrong_type(name, "a string (token ids are given as input_ids)" if is_id else "a string", value)
    if not value:
        raise ValueError(f"{name} is empty; give at least one character, or input_ids")
    if value.isascii():
        return TextPrompt(value, len(value), rules=rules)
    prompt = TextPrompt(value, len(value), name, is_checked=False, rules=rules)
    return prompt.checked() if budget.covers(len(value) // CHARACTERS_PER_ID) else prompt


def pooled_prompt(name: str, value: object, budget: CheckBudget, *, options: Pooled) -> PooledPrompt:
    """Return a text to pool. It may be empty, because special tokens are added."""
    return PooledPrompt(_any_text(name, value, budget), None, options)


def pair_prompt(
    name: str, value: object, budget: CheckBudget, *, options: Pooled, query: str | None = None
) -> PooledPrompt:
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
    return PooledPrompt(_any_text(name, first, budget), _any_text(name, second, budget), options)


def _any_text(name: str, value: object, budget: CheckBudget) -> TextPrompt:
    if not isinstance(value, str):
        raise checks.wrong_type(name, "a string", value)
    return text_prompt(name, value, budget) if value else TextPrompt("", 0)


def ids_prompt(
    name: str, value: object, budget: CheckBudget, rules: EncodeRules = DEFAULT_RULES, *, may_be_empty: bool = False
) -> IdsPrompt:
    """Return a prompt of ids (any kind of integer). Ids outside the vocabulary are refused later.

    Raises:
        TypeError, ValueError: the value is not a list of ids, or empty.
    """
    if rules.add_special_tokens:
        raise ValueError(f"add_special_tokens=True is for text, and {name} has ids; put the special ones among them")
    if isinstance(value, list | tuple) or not isinstance(value, checks.Array) or not checks.num_items(value):
        value = checks.sequence(name, value, allowed=IDS)
        if not value and not may_be_empty:
            raise ValueError(f"{name} is empty; give at least one token id")
    if rules.keep_last is not None:
        value = _slice(name, value, -rules.keep_last)
    prompt = IdsPrompt(value, name, is_checked=False)
    return prompt.checked() if budget.covers(prompt.num_ids) else prompt


def chat_prompt(
    name: str, value: object, budget: CheckBudget, *, options: TemplateOptions, rules: EncodeRules = DEFAULT_RULES
) -> ChatPrompt:
    """Return a conversation. Its messages are checked now if ``budget`` covers their likely size, otherwise later.

    Raises:
        TypeError, ValueError: the value is not a list of messages, or empty.
    """
    messages = checks.sequence(name, value, allowed=MESSAGES)
    if not messages:
        raise ValueError(f"{name} is empty; give at least one dict with role and content")
    first = messages[: MAX_MESSAGES_AT_CALL if budget.num_left > 0 else NUM_SAMPLED_MESSAGES]
    sizes = [_size_of_message(message) for message in first]
    num_characters = sum(num_characters for num_characters, _ in sizes)
    num_parts = sum(num_parts for _, num_parts in sizes)
    # It counts in the limits of all calls, so messages outside the sample must not be counted as large.
    num_bytes = num_characters + BYTES_PER_PART * (len(messages) + num_parts) + options.num_characters
    prompt = ChatPrompt(list(cast("Messages", messages)), num_bytes, options, name, is_checked=False, rules=rules)
    likely = (num_characters // CHARACTERS_PER_ID + num_parts * IDS_PER_MESSAGE) * len(messages) // len(first)
    size = max(len(messages) * IDS_PER_MESSAGE, likely + options.num_characters // CHARACTERS_PER_ID)
    return prompt.checked() if budget.covers(size) else prompt


def _size_of_message(message: object) -> tuple[int, int]:
    """Return the characters of a text message, or the number of parts of another message. Fast."""
    content = cast("Mapping[object, object]", message).get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list | tuple):
        return 0, checks.num_items(cast("object", content))
    return str.__len__(content) if isinstance(content, str) else 0, 0


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
        raise ValueError(f"{name} is of type {checks.shown(part.get('type'))}; there are text, image and image_url")
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
    num_characters = checks.json_size([tools, variables], MAX_CHARACTERS_AT_CALL)
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
