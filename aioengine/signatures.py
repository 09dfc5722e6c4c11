"""The types of ``generate`` and ``chat``, written once for both faces.

One prompt gives one kind of result, a list of prompts another, a stream a third. Each face says which three these are;
its methods stay plain functions, and only type checkers look here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast, overload

from aioengine.answers import Answer, BatchOutput
from aioengine.stream import Generation, Stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from aioengine.frontend.asks import (
        BatchIds,
        BatchSampled,
        ChatOptions,
        Chats,
        RequestOptions,
        Sampled,
        Texts,
        TokenIds,
    )
    from aioengine.frontend.prompts import Messages

One = TypeVar("One", covariant=True)
Batch = TypeVar("Batch", covariant=True)
Chunks = TypeVar("Chunks", covariant=True)


class Generate(Protocol[One, Batch, Chunks]):
    """A method like ``generate``: a prompt or its token ids; a list of either is a batch."""

    @overload
    def __call__(
        self,
        prompt: str | None = None,
        sampling_params: Sampled | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        prompt: Texts,
        sampling_params: BatchSampled | None = None,
        input_ids: None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        prompt: None = None,
        sampling_params: BatchSampled | None = None,
        *,
        input_ids: BatchIds,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        prompt: str | Texts | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: TokenIds | BatchIds | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        prompt: str | Texts | None = None,
        sampling_params: BatchSampled | None = None,
        input_ids: TokenIds | BatchIds | None = None,
        *,
        stream: bool,
        **options: Unpack[RequestOptions],
    ) -> One | Batch | Chunks: ...


class Chat(Protocol[One, Batch, Chunks]):
    """A method like ``chat``: a conversation; a list of them is a batch."""

    @overload
    def __call__(
        self,
        messages: Messages,
        sampling_params: Sampled | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> One: ...
    @overload
    def __call__(
        self,
        messages: Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Batch: ...
    @overload
    def __call__(
        self,
        messages: Messages | Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Chunks: ...
    @overload
    def __call__(
        self,
        messages: Messages | Chats,
        sampling_params: BatchSampled | None = None,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> One | Batch | Chunks: ...


AsyncGenerate = Generate[Generation[Answer], Generation[BatchOutput], Stream]
AsyncChat = Chat[Generation[Answer], Generation[BatchOutput], Stream]


def async_generate(method: Callable[..., object]) -> AsyncGenerate:
    """Give a method the types of ``async_generate``."""
    return cast("AsyncGenerate", method)


def async_chat(method: Callable[..., object]) -> AsyncChat:
    """Give a method the types of ``async_chat``."""
    return cast("AsyncChat", method)
