"""Admission: the token budget of a step, the admission of waiting requests, and the forecast of missed deadlines.

A step computes up to ``chunk_tokens``. Decode rows come first, all of them in every step. A decode row reads its
entire context, so it may count as more than one token; otherwise steps with many decode rows would become too long.
Prompts share the rest in order: a prompt that can be finished takes all its tokens, any other prompt takes half of the
remaining budget, and the remainder is divided in the same order. So a long prompt advances in every step, a short
prompt behind it does not wait for its end, and the budget is used up. One exception: if no long prompt is being
computed, a short prompt that does not fit waits for the next step.

Running requests are sorted by ``running_order``: higher priority first, then older first. If pages run out, the last
one is preempted, so the first one always finishes. The computed pages of a preempted request stay in the prefix cache
until they are evicted, and the request returns to its old position in the queue.

To prevent thrashing, a request is admitted only if then every running request has pages for some more steps (or for all
tokens that it can still need). So no request is preempted within that many steps after an admission.

The forecast is a lower bound of the time that a request still needs: a request is refused only if it would surely miss
its deadline. So it uses the fastest recent step, half of the recent queue time, and one token for an output that may
stop early. The caller passes all times.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from aioengine.memory.prefix_cache import Match, PrefixCache
from aioengine.protocol.messages import End, FinishCode, Media, RequestKind, Submit
from aioengine.scheduler.request import Request

MAX_PARTIAL = 4  # partly computed prompts at a time; a prompt that finishes in this step is always allowed
MIN_SHARE = 16  # tokens; smaller chunks are not worth a row
STEPS_AHEAD = 16  # if the request runs for the first time
STEPS_AHEAD_AGAIN = 32  # if it was preempted before


class Refusal(Enum):
    """LATER: it waits for a prefix or for its turn; other requests may be admitted. FULL: pages are short; none may."""

    LATER = 0
    FULL = 1


class Admission:
    """The checks before an admission. They only change the prefix for which the request waits."""

    def __init__(self, cache: PrefixCache, chunk_tokens: int) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens

    def ask(
        self, request: Request, running: Sequence[Request], *, left: int, num_partial: int, promised: int = 0
    ) -> Match | Refusal:
        """Return the computed prefix of the request if it can be admitted, else the reason.

        left: tokens left in this step. num_partial: partly computed prompts. promised: pages that running requests
        still need for their known tokens.
        """
        if num_partial >= MAX_PARTIAL and request.num_tokens > left:
            return Refusal.LATER
        match = self._cache.match(request.ids_to_match, request.salt, known=request.waits_for)
        request.wait_for(match.pending)
        if match.pending is not None:
            if self._cache.snapshots is not None and match.missing_snapshot is not None:
                self._cache.snapshots.stop_at(match.missing_snapshot)
            return Refusal.LATER
        cache = self._cache
        num_left = cache.num_left(match, request.num_tokens, promised)
        if num_left < 0:
            return Refusal.FULL
        if not running:
            return match
        num_missing = request.num_tokens - len(match.path) * cache.page_size
        max_pages = cache.pages_for(steps_ahead(request, num_missing, self._chunk_tokens))
        if num_left < max_pages * (len(running) + 1):  # then count the pages of each request in these steps
            missing = [
                cache.pages_for(member.next_limit) - cache.pages_for(member.num_tokens)
                for member in (*running, request)
            ]
            if num_left < sum(min(max_pages, num_pages) for num_pages in missing):
                return Refusal.FULL
        return match

    def waits(self, request: Request) -> bool:
        """Return whether another request is still computing the prefix (or snapshot) for which the request waits."""
        node, snapshots = request.waits_for, self._cache.snapshots
        if node is None:
            return False
        return node.is_pending if snapshots is None else snapshots.has_producer(node)


class TokenBudget:
    """The tokens of one step that are left for prompts."""

    def __init__(self, chunk_tokens: int, decode_tokens: int) -> None:
        self.left = max(chunk_tokens - decode_tokens, chunk_tokens // 8, 1)

    def take_share(self, wanted: int) -> int:
        """Take ``wanted`` tokens if enough are left, else half of the budget. Return the number taken."""
        return self.take_rest(wanted if wanted <= self.left else max(self.left // 2, MIN_SHARE))

    def take_whole(self, wanted: int) -> int:
        """Take ``wanted`` tokens even if fewer are left. Return the number taken."""
        self.left = max(0, self.left - wanted)
        return wanted

    def take_rest(self, wanted: int) -> int:
        """Take up to ``wanted`` tokens. Return the number taken."""
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


class ImageBudget:
    """Limits the images that one step starts, because the vision tower computes each image in one step.

    The images of a step have at most ``chunk_tokens`` features together. A larger image is the only one of its step.
    """

    def __init__(self, chunk_tokens: int, *, keeps_whole: bool) -> None:
        """keeps_whole: all tokens of an image are computed in one step; one image of a step may exceed the budget."""
        self._left = chunk_tokens
        self._is_untouched = True
        self._keeps_whole = self._may_exceed = keeps_whole

    def limited(self, media: Sequence[Media], start: int, count: int, *, is_first: bool) -> int:
        """Return how many of ``count`` tokens of a prompt, starting at ``start``, fit into this step, and take their
        images from the budget.

        is_first: this is the first step of the prompt. An image started in an earlier step costs nothing, because its
        features are kept.
        """
        for image in media:
            begins = image.start >= start or (is_first and image.start + image.num_tokens > start)
            if not begins or image.start >= start + count:
                continue
            if image.num_features > self._left and not self._is_untouched:
                return max(image.start - start, 0)
            self._left -= image.num_features
            self._is_untouched = False
        return self._whole(media, start, count) if self._keeps_whole else count

    def _whole(self, media: Sequence[Media], start: int, count: int) -> int:
        """Return ``count``, changed so that no image is split."""
        for image in media:
            end = image.start + image.num_tokens
            if image.start < start + count < end:
                if image.start > start:
                    return image.start - start
                if not self._may_exceed:
                    return 0
                self._may_exceed = False
                return end - start
        return count


def steps_ahead(request: Request, num_missing: int, chunk_tokens: int) -> int:
    """Return for how many steps every running request must have pages after ``request`` is admitted."""
    steps = STEPS_AHEAD_AGAIN if request.num_preemptions else STEPS_AHEAD
    return steps + 2 * num_missing // chunk_tokens


DRIFT = 1.01  # the fastest step time grows by this factor with each later step
WEIGHT = 0.1  # weight of the newest interval in the moving average of intervals between admissions
QUEUE_TIME_FACTOR = 0.5  # the forecast uses this part of the average interval


class TimeEstimates:
    """Estimates of step time and queue time. Unknown estimates are 0."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._step_s = 0.0
        self._full_step_s = 0.0
        self._admission_s = 0.0
        self._admitted_at = 0.0
        self._has_next = False

    def note_step(self, seconds: float, num_prompt_tokens: int) -> None:
        """Record a step time. A step at least half full of prompt tokens counts as a prompt step, else as decode."""
        is_full = 2 * num_prompt_tokens >= self._chunk_tokens
        previous = self._full_step_s if is_full else self._step_s
        recent = min(seconds, previous * DRIFT) if previous else seconds
        if is_full:
            self._full_step_s = recent
        else:
            self._step_s = recent

    def note_admission(self, now: float, *, has_next: bool) -> None:
        """Record an admission. has_next: another request is waiting, so the interval to its admission counts."""
        if self._has_next:
            interval_s = now - self._admitted_at
            self._admission_s += (interval_s - self._admission_s) * (WEIGHT if self._admission_s else 1.0)
        self._admitted_at = now
        self._has_next = has_next

    def queue_s(self, num_ahead: int) -> float:
        """Estimate the seconds until ``num_ahead`` other requests are admitted."""
        return QUEUE_TIME_FACTOR * self._admission_s * num_ahead

    def prompt_s(self, num_tokens: int) -> float:
        """Estimate the seconds to compute ``num_tokens`` prompt tokens."""
        num_full = num_tokens // self._chunk_tokens
        return num_full * (self._full_step_s or self._step_s) + (self._step_s if num_tokens % self._chunk_tokens else 0)

    def output_s(self, num_tokens: int) -> float:
        """Estimate the seconds to compute ``num_tokens`` output tokens."""
        return num_tokens * self._step_s


def refusal_of_late(
    submit: Submit, estimates: TimeEstimates, now: float, *, num_ahead: int, num_missing: int
) -> End | None:
    """Return the end of a request with ``refuse_late`` that will surely miss one of its deadlines, else None.

    num_ahead: requests to admit before it. num_missing: prompt tokens to compute before its first output.
    """
    limits = submit.limits
    if not limits.refuses_late or submit.continuation is not None:
        return None
    admitted_s = estimates.queue_s(num_ahead)
    first_token_s = admitted_s + estimates.prompt_s(num_missing)
    ended_s = first_token_s + estimates.output_s(_min_output(submit) - 1)
    needed = {"queue": admitted_s, "first_token": first_token_s, "total": ended_s}
    for which, deadline in limits.deadlines.items():
        needed_s = needed[which]
        if now + needed_s > deadline:
            name = "timeout" if which == "total" else f"{which}_timeout"
            text = f"it would take {needed_s:.3g} s at least, and its {name} leaves {max(0.0, deadline - now):.3g} s"
            missed_ms = max(1, round(1000 * (now + needed_s - deadline)))
            return End(submit.uid, FinishCode.REFUSED, missed_ms, message=text)
    return None


def _min_output(submit: Submit) -> int:
    """Return the minimum number of output tokens. A vector or a distribution counts as one."""
    if submit.kind is not RequestKind.GENERATE:
        return 1
    text, limits = submit.text, submit.limits
    can_stop = limits.stop_token_ids or text.stop or text.stop_regex
    return max(1, limits.min_new_tokens if can_stop else limits.max_new_tokens)
