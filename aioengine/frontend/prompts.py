"""Prompts as a caller gives them, checked at the call.

Looking at every part of a very large one would hold the caller's loop: that is done later, on the tokenizer's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, cast, overload

from msgspec import Struct, ValidationError, convert

from aioengine import checks
from aioengine.frontend.chats import ChatForm

Messages = Sequence[Mapping[str, object]]
"""A conversation: dicts with ``role`` and ``content``, as chat templates read them."""

MESSAGES: Final = "a list of dicts with role and content"

MAX_IDS_AT_CALL: Final = 64 * 1024
MAX_CHARACTERS_AT_CALL: Final = 256 * 1024
MAX_MESSAGES_AT_CALL: Final = 256
"""Larger prompts are looked at on the tokenizer's thread, in slices, and refused at the first await."""
MAX_ROWS_AT_CALL: Final = 1024
"""Of a longer batch, the call looks only at the kind of the rows behind these; the rest as of large prompts."""
IDS_IN_SLICE: Final = 16 * 1024
MESSAGES_IN_SLICE: Final = 64


class TextPrompt(Struct, frozen=True, gc=False):
    """Text to be tokenized. ``num_bytes``: of its UTF-8."""

    text: str
    num_bytes: int


class ChatPrompt(Struct, frozen=True):
    """A conversation to be put through a chat template, then tokenized without special tokens.

    ``num_bytes``: about, the characters of its text.
    """

    messages: Messages
    num_bytes: int
    form: ChatForm = ChatForm()


class IdsPrompt(Struct, frozen=True, gc=False):
    """Token ids."""

    token_ids: list[int]

    @property
    def num_ids(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Of the list."""
        return 8 * len(self.token_ids)


class RefusedPrompt(Struct, frozen=True):
    """A row of a batch that is wrong and is to have its error in its place (``return_exceptions=True``)."""

    error: ValueError | TypeError
    num_bytes: int = 0


class LargePrompt(Struct, frozen=True):
    """A prompt that takes long to look at, as it was given; ``look`` does it, elsewhere.

    ``look`` raises TypeError or ValueError for what is wrong with it. ``num_bytes``: about, and of a text not more than
    it has. ``num_ids``: 0 for text.
    """

    name: str
    value: object
    look: Callable[[str, object], Prompt]
    num_bytes: int
    num_ids: int = 0


Prompt = TextPrompt | ChatPrompt | IdsPrompt | RefusedPrompt | LargePrompt


def text_prompt(name: str, value: object) -> TextPrompt | LargePrompt:
    value = checks.plain(value)
    if not isinstance(value, str):
        is_id = isinstance(value, int) and not isinstance(value, bool)
        raise checks.wrong_type(name, "a string (token ids are given as input_ids)" if is_id else "a string", value)
    if not value:
        raise ValueError(f"{name} is empty; give at least one character, or input_ids")
    if value.isascii():
        return TextPrompt(value, len(value))
    if len(value) > MAX_CHARACTERS_AT_CALL:
        return LargePrompt(name, value, _long_text, num_bytes=len(value))
    return _long_text(name, value)


def _long_text(name: str, value: object) -> TextPrompt:
    """Text of any length: how many bytes it has, and that all of it is characters."""
    text = cast("str", value)
    num_bytes = 0
    for start in range(0, len(text), MAX_CHARACTERS_AT_CALL):
        if start:
            _let_others_run()
        try:
            num_bytes += len(text[start : start + MAX_CHARACTERS_AT_CALL].encode())
        except UnicodeEncodeError as error:
            place = start + error.start
            raise ValueError(
                f"{name} has a lone surrogate at position {place}, which is no character: "
                f"{checks.shown(text[max(0, place - 10) : place + 10])}"
            ) from None
    return TextPrompt(text, num_bytes)


def _let_others_run() -> None:
    """Give the interpreter to a thread that waits for it, which else takes it after 5 ms."""
    time.sleep(0)


class Rows(Sequence[Prompt]):
    """The prompts of a batch. Of a long one, those behind the first are made when they begin.

    ``first``: those that the call looked at. ``rest``: the others as they were given.
    """

    def __init__(
        self, first: list[Prompt], rest: Sequence[object] = (), make: Callable[[int, object], Prompt] | None = None
    ) -> None:
        self.first = first
        self._rest = rest
        self._make = make
        self._refused: dict[int, RefusedPrompt] = {}

    def __len__(self) -> int:
        return len(self.first) + len(self._rest)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self._at(each) for each in range(*place.indices(len(self)))]
        return self._at(range(len(self))[place])

    def _at(self, place: int) -> Prompt:
        if (refused := self._refused.get(place)) is not None:
            return refused
        num_first = len(self.first)
        if place < num_first or self._make is None:
            return self.first[place]
        return self._make(place, self._rest[place - num_first])

    def refuse(self, place: int, error: ValueError | TypeError) -> None:
        """This one has its error in its place."""
        self._refused[place] = RefusedPrompt(error)


def later_text(name: str, value: object) -> Prompt:
    """Text whose kind is known already."""
    text = cast("str", value)
    return (TextPrompt if text.isascii() else partial(LargePrompt, name, look=_long_text))(text, num_bytes=len(text))


def later_ids(name: str, value: object) -> Prompt:
    """Ids, in a list that is not empty."""
    given = cast("Sequence[object]", value)
    return LargePrompt(name, given, _many_ids, num_bytes=8 * len(given), num_ids=len(given))


class RowsOfIds:
    """Makes the prompts of a batch; rows behind as many ids as a call looks at are looked at when they begin."""

    def __init__(self) -> None:
        self._num_ids = 0

    def __call__(self, name: str, value: object) -> IdsPrompt | LargePrompt:
        prompt = ids_prompt(name, value, num_before=self._num_ids)
        self._num_ids += prompt.num_ids
        return prompt


def ids_prompt(name: str, value: object, *, num_before: int = 0) -> IdsPrompt | LargePrompt:
    """Ids of any kind of integer; those outside the vocabulary are found by the engine, which knows it."""
    given = checks.sequence(name, value, allowed="a list of token ids")
    if not given:
        raise ValueError(f"{name} is empty; give at least one token id")
    if num_before + len(given) > MAX_IDS_AT_CALL:
        return LargePrompt(name, given, _many_ids, num_bytes=8 * len(given), num_ids=len(given))
    return IdsPrompt(_ids(name, given))


def _ids(name: str, given: Sequence[object]) -> list[int]:
    """A list of its own, in one pass where all are plain integers."""
    try:
        return convert(given, list[int])
    except ValidationError:
        return [checks.whole(f"{name} entries", entry, 0) for entry in given]


def _many_ids(name: str, value: object) -> IdsPrompt:
    given = cast("Sequence[object]", value)
    token_ids: list[int] = []
    for start in range(0, len(given), IDS_IN_SLICE):
        if start:
            _let_others_run()
        token_ids += _ids(name, given[start : start + IDS_IN_SLICE])
    return IdsPrompt(token_ids)


def chat_prompt(name: str, value: object, *, form: ChatForm) -> Prompt:
    given = checks.sequence(name, value, allowed=MESSAGES)
    if not given:
        raise ValueError(f"{name} is empty; give at least one dict with role and content")
    first = given[:MAX_MESSAGES_AT_CALL]
    num_characters = sum(map(_weight, first)) * len(given) // len(first) + form.num_characters
    if len(given) > len(first) or num_characters > MAX_CHARACTERS_AT_CALL:
        return LargePrompt(name, list(given), partial(_many_messages, form), num_bytes=num_characters)
    messages = [_message(f"{name}[{position}]", message) for position, message in enumerate(given)]
    return _chat(name, messages, form)


def _chat(name: str, messages: list[dict[str, object]], form: ChatForm) -> ChatPrompt:
    try:
        return ChatPrompt(messages, _num_characters(messages) + form.num_characters, form)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or holds itself; give plain text parts") from None


def _weight(message: object) -> int:
    """About the characters of a message, in no time; a part of it counts as many."""
    content = cast("Mapping[object, object]", message).get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list | tuple):
        return len(cast("Sequence[object]", content)) * (MAX_CHARACTERS_AT_CALL // MAX_MESSAGES_AT_CALL)
    return str.__len__(content) if isinstance(content, str) else 0


def _many_messages(form: ChatForm, name: str, value: object) -> ChatPrompt:
    messages: list[dict[str, object]] = []
    for position, message in enumerate(cast("Sequence[object]", value)):
        if position % MESSAGES_IN_SLICE == 0:
            _let_others_run()
        messages.append(_message(f"{name}[{position}]", message))
    return _chat(name, messages, form)


def _message(name: str, value: object) -> dict[str, object]:
    """A message with its role and its content: text, text parts, or None, as calls of tools and assistants have it."""
    if not isinstance(value, Mapping):
        raise checks.wrong_type(name, "a dict with role and content", value)
    message = _with_plain_keys(value)
    if message.get("role") is None:
        raise ValueError(f"{name} has no role, got {checks.shown(message)}")
    role = message["role"] = checks.text(f"the role of {name}", message["role"])
    content = message.get("content")
    if content is None:
        is_silent = role == "assistant" and "content" in message
        if not message.get("tool_calls") and not is_silent:
            raise ValueError(f"{name} has no content, got {checks.shown(message)}")
    elif isinstance(content, list | tuple):
        parts = cast("Sequence[object]", content)
        message["content"] = [_part(f"part {place} of {name}", part) for place, part in enumerate(parts)]
    elif isinstance(content, str):
        message["content"] = checks.text(f"the content of {name}", content)
    else:
        raise checks.wrong_type(f"the content of {name}", "a string or a list of text parts", content)
    return message


def _part(name: str, value: object) -> dict[str, object]:
    """One part of a message's content: ``{"type": "text", "text": ...}``; there are no others yet."""
    if not isinstance(value, Mapping):
        raise checks.wrong_type(name, 'a dict such as {"type": "text", "text": "..."}', value)
    part = _with_plain_keys(value)
    if checks.plain(part.get("type")) != "text":
        raise ValueError(f"{name} is of type {checks.shown(part.get('type'))}; only text is supported yet")
    return part | {"type": "text", "text": checks.text(f"the text of {name}", part.get("text"))}


def _with_plain_keys(value: Mapping[object, object]) -> dict[str, object]:
    """A copy, with plain strings for keys of an enumeration."""
    return {cast("str", checks.plain(key)): entry for key, entry in value.items()}


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, cast("Mapping[object, object]", value).values()))
    return sum(map(_num_characters, cast("list[object]", value))) if isinstance(value, list) else 0
