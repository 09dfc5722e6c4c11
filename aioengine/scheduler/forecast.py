"""Forecast: the least time that a request still needs, by the recent pace. Pure: times come as arguments.

The forecast is rather too small than too large: a request that it calls late would surely be late. So a step counts
as the fastest recent one, the queue as twice as fast as it was, and an output that may end by itself as one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.protocol.messages import End, FinishCode, RequestKind

if TYPE_CHECKING:
    from aioengine.protocol.messages import Submit

DRIFT = 1.01  # with each later step the fastest one counts as this much slower
WEIGHT = 0.1  # of the newest interval between two admissions
CONFIDENCE = 0.5  # the part of the recent intervals that the forecast counts


class Pace:
    """How fast steps are and how fast the queue moves. Unknown estimates count as 0."""

    __slots__ = ("_admission_s", "_admitted_at", "_chunk_tokens", "_full_step_s", "_has_next", "_step_s")

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._step_s = 0.0
        self._full_step_s = 0.0
        self._admission_s = 0.0
        self._admitted_at = 0.0
        self._has_next = False

    def note_step(self, seconds: float, num_prompt_tokens: int) -> None:
        """A step took ``seconds``; one at least half full of prompts counts for prompts, any other for decoding."""
        if 2 * num_prompt_tokens >= self._chunk_tokens:
            self._full_step_s = _recent_least(self._full_step_s, seconds)
        else:
            self._step_s = _recent_least(self._step_s, seconds)

    def note_admission(self, now: float, *, has_next: bool) -> None:
        """A request was admitted; ``has_next``: another one was waiting, so that the interval until it counts."""
        if self._has_next:
            interval_s = now - self._admitted_at
            self._admission_s += (interval_s - self._admission_s) * (WEIGHT if self._admission_s else 1.0)
        self._admitted_at = now
        self._has_next = has_next

    def queue_s(self, num_ahead: int) -> float:
        """Seconds until ``num_ahead`` other requests have been admitted."""
        return CONFIDENCE * self._admission_s * num_ahead

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds to compute ``num_tokens`` of prompts."""
        num_full = num_tokens // self._chunk_tokens
        return num_full * (self._full_step_s or self._step_s) + (self._step_s if num_tokens % self._chunk_tokens else 0)

    def output_s(self, num_tokens: int) -> float:
        """Seconds to give ``num_tokens`` output tokens."""
        return num_tokens * self._step_s


def refusal_of_late(submit: Submit, pace: Pace, now: float, *, num_ahead: int, num_missing: int) -> End | None:
    """The end of a request that will surely miss one of its deadlines, where it asked for that; else None.

    num_ahead: requests to be admitted before it can be. num_missing: prompt tokens to compute before its first output.
    """
    limits = submit.limits
    if not limits.refuses_late or submit.continuation is not None:
        return None
    admitted_s = pace.queue_s(num_ahead)
    first_token_s = admitted_s + pace.prompt_s(num_missing)
    ended_s = first_token_s + pace.output_s(_least_output(submit) - 1)
    needed = {"queue": admitted_s, "first_token": first_token_s, "total": ended_s}
    for which, deadline in limits.deadlines().items():
        needed_s = needed[which]
        if now + needed_s > deadline:
            name = "timeout" if which == "total" else f"{which}_timeout"
            text = f"it would take {needed_s:.3g} s at least, and its {name} leaves {max(0.0, deadline - now):.3g} s"
            missed_ms = max(1, round(1000 * (now + needed_s - deadline)))
            return End(submit.uid, FinishCode.REFUSED, missed_ms, message=text)
    return None


def _least_output(submit: Submit) -> int:
    """The least number of output tokens; a vector counts as one."""
    if submit.kind is RequestKind.POOL:
        return 1
    text, limits = submit.text, submit.limits
    can_stop = limits.stop_token_ids or text.stop or text.stop_regex
    return max(1, limits.min_new_tokens if can_stop else limits.max_new_tokens)


def _recent_least(least: float, seconds: float) -> float:
    return seconds if least == 0 else min(seconds, least * DRIFT)
