"""Decides how many drafts a row gets: a cost model of measured step times, and the acceptance of each request.

A step takes longer with every draft that it computes, and gives more tokens for every draft that it accepts. So the
*price* of a draft is the time that it adds to a step, in tokens: the time of one token is the time of a plain step
divided by its rows. With one row a draft costs little and replaces a whole step. With many rows it costs about as much
as the token that it may save.

The n-th draft of a request is accepted with the probability ``rate ** n``, because all drafts before it must be
accepted, too. A row gets the drafts that are worth more than their price. A request whose drafts do not pay gets none,
and a *probe* from time to time, ever more rarely. If nothing is found to propose, it is also looked for ever more
rarely. All functions are pure: times are arguments.
"""

from __future__ import annotations

from math import log
from typing import Final

DECAY: Final = 0.98
"""Weight of an older measurement relative to the next newer one."""
MIN_WEIGHT: Final = 4.0
"""Measurements that a line needs."""
MIN_VARIANCE: Final = 0.25
"""Variance of the number of drafts that a line needs; otherwise plain steps are the second point of the line."""
OUTLIER: Final = 3.0
"""A step that takes longer than this times the average counts as this: something else used the machine."""
PLAIN_EVERY: Final = 64
"""With drafts in every step, one of this number of steps is plain, to measure its time."""
FIRST_PLAIN: Final = 8

PRIOR_WEIGHT: Final = 2.0
PROBE: Final = 2
"""Drafts of a probe."""
MIN_PAUSE: Final = 8
MAX_PAUSE: Final = 256
"""Steps of a request without drafts between two probes."""
EMPTY_STEPS: Final = 8
"""Every time this number of steps in a row had no proposals, the pause before the next attempt grows by a step."""
MAX_EMPTY_PAUSE: Final = 32


class _Line:
    """The time of steps as a linear function of the number of drafts: weighted least squares."""

    def __init__(self) -> None:
        self.weight = self.mean_drafts = self.mean_s = 0.0
        self._drafts_2 = self._drafts_s = 0.0  # weighted sums of products of the deviations from the means

    def add(self, num_drafts: int, seconds: float) -> None:
        if self.weight >= MIN_WEIGHT:
            seconds = min(seconds, OUTLIER * self.mean_s)
        self.weight = DECAY * self.weight + 1
        from_drafts, from_s = num_drafts - self.mean_drafts, seconds - self.mean_s
        self.mean_drafts += from_drafts / self.weight
        self.mean_s += from_s / self.weight
        self._drafts_2 = DECAY * self._drafts_2 + from_drafts * (num_drafts - self.mean_drafts)
        self._drafts_s = DECAY * self._drafts_s + from_drafts * (seconds - self.mean_s)

    def slope(self) -> float | None:
        """Return the seconds that a draft adds; None: the steps had the same number of drafts."""
        if self.weight < MIN_WEIGHT or self._drafts_2 < MIN_VARIANCE * self.weight:
            return None
        return max(0.0, self._drafts_s / self._drafts_2)


class _Times:
    """Times of steps with a similar number of rows. num_since_plain: steps with drafts since the last plain step."""

    def __init__(self) -> None:
        self.plain = _Line()
        self.with_drafts = _Line()
        self.num_since_plain = 0


class DraftCosts:
    """Measured times of steps.

    Attributes:
        rate: probability that a draft of a new request is accepted, from all requests.
    """

    def __init__(self) -> None:
        self.rate = 0.5
        self._times: dict[int, _Times] = {}  # bit length of the number of rows -> times
        self._prices: dict[int, tuple[float, float]] = {}  # number of rows -> prices, since the last step

    def note_step(self, seconds: float, *, num_rows: int, num_drafts: int, may_draft: bool) -> None:
        """Record a step of decode rows.

        num_drafts: drafts that were proposed. may_draft: whether any row could have drafts; False: a plain step.
        """
        self._prices.clear()
        times = self._times_of(num_rows)
        if may_draft:
            times.with_drafts.add(num_drafts, seconds)
            times.num_since_plain += 1
        else:
            # A step with drafts begins before the results of the step before it are read, so it delays them. The first
            # plain step is followed by another one, because the next step is planned before a step is recorded.
            if times.num_since_plain or not times.with_drafts.weight:
                times.plain.add(0, seconds)
            times.num_since_plain = 0

    def is_plain_due(self, num_rows: int) -> bool:
        """Return whether the next step should be plain, because the time of a plain step is unknown or old."""
        times = self._times_of(num_rows)
        if not times.with_drafts.mean_s:  # no clock
            return False
        return times.num_since_plain >= (PLAIN_EVERY if times.plain.weight >= MIN_WEIGHT else FIRST_PLAIN)

    def price(self, num_rows: int) -> tuple[float, float]:
        """Return the price of a draft, and the price per row of a step that may have drafts, in tokens.

        Unknown prices are 0, so drafting begins at once. The second price exists for example if a step cannot overlap
        the one before.
        """
        if (prices := self._prices.get(num_rows)) is None:
            prices = self._prices[num_rows] = _prices(self._times_of(num_rows), num_rows)
        return prices

    def note_drafts(self, num_tried: int, num_accepted: int) -> None:
        """Record drafts of any request, see ``Acceptance.note``."""
        self.rate += 0.02 * num_tried * (num_accepted / num_tried - self.rate)

    def _times_of(self, num_rows: int) -> _Times:
        size = num_rows.bit_length()
        if (times := self._times.get(size)) is None:
            times = self._times[size] = _Times()
        return times


def _prices(times: _Times, num_rows: int) -> tuple[float, float]:
    """See ``DraftCosts.price``."""
    plain, line = times.plain, times.with_drafts
    slope, base_s = line.slope(), plain.mean_s
    if slope is not None:
        base_s = line.mean_s - slope * line.mean_drafts
    elif plain.weight and line.mean_drafts:
        slope = max(0.0, (line.mean_s - plain.mean_s) / line.mean_drafts)
    elif plain.weight and line.weight:
        base_s = line.mean_s
    plain_s = plain.mean_s or base_s
    if plain_s <= 0:
        return 0.0, 0.0
    return (slope or 0.0) * num_rows / plain_s, max(0.0, base_s - plain_s) / plain_s


class Acceptance:
    """How often drafts of a request are proposed and accepted."""

    __slots__ = ("_accepted", "_is_probe", "_left", "_num_empty", "_pause", "_tried")

    def __init__(self, rate: float) -> None:
        """rate: assumed until drafts of this request are tried."""
        self._tried, self._accepted = PRIOR_WEIGHT, PRIOR_WEIGHT * rate
        self._num_empty = 0  # steps without proposals since the last proposal
        self._pause = MIN_PAUSE
        self._left = 0  # steps of the pause that are left
        self._is_probe = False

    def is_paused(self) -> bool:
        """Return whether its next row gets no drafts. Call it once for each row, and ``count`` if it is not paused."""
        self._left -= 1
        return self._left >= 0

    def count(self, prices: tuple[float, float], max_drafts: int) -> int:
        """Return how many drafts its next row gets, up to ``max_drafts``."""
        price, price_of_row = prices
        rate = min(self._accepted / self._tried, 0.99)
        count = max_drafts
        if price > 0:
            count = min(max_drafts, int(log(price) / log(rate))) if 0 < price < rate else 0
        gain = rate * (1 - rate**count) / (1 - rate) - price * count
        self._is_probe = gain <= price_of_row
        return min(max_drafts, PROBE) if self._is_probe else count

    def note(self, num_proposed: int, num_accepted: int) -> int:
        """Record a row that could have drafts. Return the number of drafts that were tried: after the first rejected
        draft, the others were not.
        """
        if not num_proposed:
            self._num_empty += 1
            self._left = min(self._num_empty // EMPTY_STEPS, MAX_EMPTY_PAUSE)
            return 0
        num_tried = min(num_proposed, num_accepted + 1)
        self._num_empty = 0
        self._tried = 0.9 * self._tried + num_tried
        self._accepted = 0.9 * self._accepted + num_accepted
        if not self._is_probe:
            self._pause = MIN_PAUSE
        elif num_accepted < num_proposed:
            self._left = self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        return num_tried
