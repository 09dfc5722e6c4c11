"""Times in frames between machines, whose clocks differ."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from aioengine.protocol.messages import FirstToken, Message, Stats, Submit, TextChunks


def shift_times(messages: Iterable[Message], seconds: float) -> None:
    """Add ``seconds`` to all times in messages that were just decoded: from the clock of their sender to ours."""
    for message in messages:
        match message:
            case Submit(limits=limits, continuation=earlier):
                message.arrived_at += seconds
                deadlines = {name: time + seconds for name, time in limits.deadlines.items()}
                message.limits = replace(limits, deadlines=deadlines)
                if earlier is not None:
                    message.continuation = replace(earlier, first_token=_shifted(earlier.first_token, seconds))
            case TextChunks():
                message.first_tokens = [_shifted(first_token, seconds) for first_token in message.first_tokens]
                for end in message.ended:
                    end.ended_at += seconds
                    if end.admitted_at is not None:
                        end.admitted_at += seconds
                    if end.first_token_at is not None:
                        end.first_token_at += seconds
            case Stats():
                message.sent_at += seconds
                if message.step_ended_at:
                    message.step_ended_at += seconds
            case _:  # it has no time
                pass


def _shifted(token: FirstToken, seconds: float) -> FirstToken:
    return replace(token, admitted_at=token.admitted_at + seconds, first_token_at=token.first_token_at + seconds)
