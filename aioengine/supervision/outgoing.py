"""Outgoing: what the scheduler is to be told, gathered so that few frames carry it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioengine.protocol.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioengine.protocol.messages import Message


class Outgoing:
    """Gathers messages for the rest of a round of the loop, or until their prompts fill a step.

    A program that starts a thousand requests at once takes long to start them all. The first of them are computed
    meanwhile, in as large steps as if all had come together.
    """

    def __init__(self, send: Callable[[list[Message]], None], step_tokens: int) -> None:
        """``send`` gets what makes one frame. ``step_tokens``: prompt tokens of the largest step."""
        self._send = send
        self._step_tokens = step_tokens
        self._messages: list[Message] = []
        self._num_tokens = 0
        self._is_due = False

    def add(self, messages: Iterable[Message]) -> None:
        """Send these soon, behind those before them. Without messages: an empty frame, if there is nothing else."""
        for message in messages:
            self._messages.append(message)
            if isinstance(message, Submit):
                self._num_tokens += len(message.prompt_token_ids)
        if self._num_tokens >= self._step_tokens:
            self._flush()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._is_due = False
        self._flush()

    def _flush(self) -> None:
        messages, self._messages, self._num_tokens = self._messages, [], 0
        self._send(messages)
