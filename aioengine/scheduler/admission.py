"""Admission: how much a step computes, whether a waiting request can begin now, and whom to preempt.

A step computes up to ``chunk_tokens``. Decode rows come first, all of them in every step. Each reads its whole past,
so it may count as more than the one token that it computes; else those rows would wait longer for a step the more of
them there are. The prompts share the rest, in turn: one that can be finished takes what it needs, any other one half of
what is left, and the remainder goes to them in the same order. So a long prompt moves on in every step, a short one
that arrives behind it need not wait for its end, and the tokens of the step are used up.

The running requests stand in one order, their ``rank``: higher priority first, then the older. When pages run out the
last of them is preempted, so the first always gets to its end. Its computed pages stay in the prefix cache while there
is room, and it returns to its old place in the queue.

Against thrashing, a request is admitted only when every running one, and the new one, then has pages for some more
steps (or for all that it can still need). So no request is preempted within that many steps after an admission, and a
request that comes back gets at least so far.

The forecast, the least time that a request still needs by the recent pace, is rather too small than too large: a
request that it calls late would surely be late. So a step counts as the fastest recent one, the queue as twice as fast
as it was, and an output that may end by itself as one token. Times come as arguments.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from aioengine.protocol.messages import End, FinishCode, RequestKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.memory.prefix_cache import Match, PrefixCache
    from aioengine.protocol.messages import Submit
    from aioengine.scheduler.request import Request

MAX_PARTIAL = 4  # prompts computed in part at a time; shorter ones, which end in this step, may pass
LEAST_SHARE = 16  # tokens; a smaller part of a prompt is not worth a row of its own
STEPS_AHEAD = 16  # for a request that runs for the first time
STEPS_AHEAD_AGAIN = 32  # for one that was preempted before


class Refusal(Enum):
    """LATER: it waits for a prefix, or its turn has not come; others may pass. FULL: pages are short, no other may."""

    LATER = 0
    FULL = 1


class Admission:
    """The checks before a request is admitted. They change nothing but for which prefix it waits."""

    __slots__ = ("_cache", "_chunk_tokens")

    def __init__(self, cache: PrefixCache, chunk_tokens: int) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens

    def ask(
        self, request: Request, running: Sequence[Request], *, left: int, num_partial: int, promised: int = 0
    ) -> Match | Refusal:
        """The computed prefix of the request if it can be admitted, else why not.

        left: tokens left in this step. num_partial: prompts that are computed in part. promised: pages that the running
        requests have still to take for the tokens that they have.
        """
        if num_partial >= MAX_PARTIAL and request.num_tokens > left:
            return Refusal.LATER
        match = self._cache.match(request.ids_to_match, request.salt, known=request.waits_for)
        request.wait_for(match.pending)
        if match.pending is not None:
            if self._cache.snapshots is not None and match.missing is not None:
                self._cache.snapshots.stop_at(match.missing)
            return Refusal.LATER
        return match if self._fits(request, match, running, promised) else Refusal.FULL

    def waits(self, request: Request) -> bool:
        """Whether another request is still computing the prefix for which this one waits, or its snapshot."""
        node, snapshots = request.waits_for, self._cache.snapshots
        if node is None:
            return False
        return node.is_pending if snapshots is None else snapshots.has_producer(node)

    def _fits(self, request: Request, match: Match, running: Sequence[Request], promised: int) -> bool:
        cache = self._cache
        left = cache.num_left(match, request.num_tokens, promised)
        if left < 0:
            return False
        if not running:
            return True
        num_missing = request.num_tokens - len(match.path) * cache.page_size
        steps = reserve_for(request, num_missing, self._chunk_tokens)
        if left >= cache.pages_for(steps) * (len(running) + 1):
            return True
        return left >= pages_ahead((*running, request), steps, cache)


class TokenBudget:
    """The tokens of one step that are left for prompts."""

    __slots__ = ("left",)

    def __init__(self, chunk_tokens: int, decode_tokens: int) -> None:
        self.left = max(chunk_tokens - decode_tokens, chunk_tokens // 8, 1)

    def take_share(self, wanted: int) -> int:
        """Take ``wanted`` tokens if they are left, else half of what is left; returns how many."""
        return self._take(wanted if wanted <= self.left else max(self.left // 2, LEAST_SHARE))

    def take_whole(self, wanted: int) -> int:
        """Take ``wanted`` tokens, also if fewer are left; returns how many."""
        self.left = max(0, self.left - wanted)
        return wanted

    def take_rest(self, wanted: int) -> int:
        """Take up to ``wanted`` of the tokens that are left; returns how many."""
        return self._take(wanted)

    def _take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


def reserve_for(request: Request, num_missing: int, chunk_tokens: int) -> int:
    """How many steps ahead every running request must have pages for, once ``request`` is admitted."""
    steps = STEPS_AHEAD_AGAIN if request.history.num_preemptions else STEPS_AHEAD
    return steps + 2 * num_missing // chunk_tokens


def pages_ahead(requests: Iterable[Request], steps: int, cache: PrefixCache) -> int:
    """The pages that these requests may take within ``steps``, beyond those for the tokens that they have."""
    most = cache.pages_for(steps)
    pages_for = cache.pages_for
    return sum(min(most, pages_for(request.max_tokens) - pages_for(request.num_tokens)) for request in requests)


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
    """The least number of output tokens; a vector or a distribution counts as one."""
    if submit.kind is not RequestKind.GENERATE:
        return 1
    text, limits = submit.text, submit.limits
    can_stop = limits.stop_token_ids or text.stop or text.stop_regex
    return max(1, limits.min_new_tokens if can_stop else limits.max_new_tokens)


def _recent_least(least: float, seconds: float) -> float:
    return seconds if least == 0 else min(seconds, least * DRIFT)
