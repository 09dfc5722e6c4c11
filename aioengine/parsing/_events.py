"""The parts of an answer, in the order of its text."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text for the reader of the answer."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text that the model wrote before its answer, to think."""

    text: str


class ToolCallBegin(Struct, frozen=True):
    """The beginning of a tool call. ``index`` counts the tool calls of the answer from 0."""

    index: int
    name: str


class ToolArguments(Struct, frozen=True):
    """A piece of the arguments of a tool call. All pieces together are the JSON text of an object."""

    index: int
    text: str


class ToolCallEnd(Struct, frozen=True):
    """The end of a tool call. If the answer ended within the arguments, their JSON text is incomplete."""

    index: int


Event: TypeAlias = Content | Reasoning | ToolArguments | ToolCallBegin | ToolCallEnd
