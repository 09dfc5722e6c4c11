"""Forecast: the least time that a request still needs, by the pace of late. Pure: times come as arguments.

It is meant to be too small rather than too large: whoever it calls late would surely be late. So steps count as the
fastest of late, what lies before others in the queue is known by how fast the queue moved, taken twice as fast, and
an output that may end by itself counts as one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.protocol.messages import FinishCode, RequestKind
from aioengine.scheduler.stopping import Finish

if TYPE_CHECKING:
    from aioengine.protocol.messages import Submit

DRIFT = 1.01  # a fastest step is forgotten by so much with each later one
WEIGHT = 0.1  # of the newest interval between two admissions
CONFIDENCE = 0.5  # the queue may move so much faster


class Pace:
    """How fast steps are and how fast the queue moves. Nothing known is no time at all."""

    __slots__ = ("_admission_s", "_admitted_at", "_chunk_tokens", "_full_step_s", "_step_s", "_was_waited")

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._step_s = 0.0
        self._full_step_s = 0.0
        self._admission_s = 0.0
        self._admitted_at = 0.0
        self._was_waited = False

    def note_step(self, seconds: float, num_prompt_tokens: int) -> None:
        """A step took so long; at least half full of prompts, it tells what prompts cost."""
        if 2 * num_prompt_tokens >= self._chunk_tokens:
            self._full_step_s = _recent_least(self._full_step_s, seconds)
        else:
            self._step_s = _recent_least(self._step_s, seconds)

    def note_admission(self, now: float, *, is_waited: bool) -> None:
        """A request was let in; ``is_waited``: another one was waiting then, so that the next interval counts."""
        if self._was_waited:
            interval_s = now - self._admitted_at
            self._admission_s += (interval_s - self._admission_s) * (WEIGHT if self._admission_s else 1.0)
        self._admitted_at = now
        self._was_waited = is_waited

    def queue_s(self, num_ahead: int) -> float:
        """Until so many others have been let in."""
        return CONFIDENCE * self._admission_s * num_ahead

    def prompt_s(self, num_tokens: int) -> float:
        """To compute so many tokens of prompts."""
        num_full = num_tokens // self._chunk_tokens
        return num_full * (self._full_step_s or self._step_s) + (self._step_s if num_tokens % self._chunk_tokens else 0)

    def output_s(self, num_tokens: int) -> float:
        """To give so many output tokens."""
        return num_tokens * self._step_s


def refusal_of_late(submit: Submit, pace: Pace, now: float, *, num_ahead: int, num_missing: int) -> Finish | None:
    """The end of a request that will surely miss one of its deadlines, where it asked for that; else None.

    num_ahead: requests to be let in before it can be. num_missing: prompt tokens to compute before its first output.
    """
    limits = submit.limits
    if not limits.refuses_late or submit.resumed is not None:
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
            return Finish(FinishCode.REFUSED, max(1, round(1000 * (now + needed_s - deadline))), message=text)
    return None


def _least_output(submit: Submit) -> int:
    """Output tokens that come in any case; a vector counts as one."""
    if submit.kind is RequestKind.POOL:
        return 1
    text, limits = submit.text, submit.limits
    can_stop = limits.stop_token_ids or text.stop or text.stop_regex
    return max(1, limits.min_new_tokens if can_stop else limits.max_new_tokens)


def _recent_least(least: float, seconds: float) -> float:
    return seconds if least == 0 else min(seconds, least * DRIFT)
