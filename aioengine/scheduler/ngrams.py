"""Proposes drafts by prompt lookup: if the last tokens of a request occurred before, the tokens after them may follow.

The scheduler looks them up before it plans a step, so a step without proposals is a plain step. The index maps the hash
of each n-gram to the end of its latest occurrence. So a token costs the same time in a short and in a long request. The
index is brought up to date only before a lookup: a request that is never looked up has no index. A long prompt is
indexed in parts, because all requests wait meanwhile (131,072 tokens at once: 0.3 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

SIZES: Final = (6, 3)
"""Lengths of the n-grams, in the order in which they are looked up. Matches shorter than three tokens are accidents."""
MAX_INDEXED: Final = 4096
"""Tokens that a lookup adds to the index: about 3 ms."""


class NgramProposer:
    """The tokens of a request, prompt then output, and the index of their n-grams.

    Attributes:
        token_ids: all known tokens. The owner appends new ones.
    """

    __slots__ = ("_ends", "_first", "_num_indexed", "token_ids")

    def __init__(self, token_ids: list[int], *, first: int = 0) -> None:
        """first: tokens before this index are not looked up."""
        self.token_ids = token_ids
        self._first = first
        self._num_indexed = 0
        self._ends: dict[int, dict[int, int]] = {size: {} for size in SIZES}  # size -> hash -> end (exclusive)

    def propose(self, count: int, in_flight: Sequence[int] | None = None) -> tuple[int, list[int]]:
        """Return the newest token and, as drafts after it, the ``count`` tokens that followed the latest earlier
        occurrence of the last tokens. No drafts: there is no such occurrence.

        The longest n-gram that occurred before decides. If fewer tokens followed it, they are repeated, because the
        text then has this period.

        in_flight: the drafts of the step in flight, whose tokens are not known yet; None: there is no such step. It is
        expected to sample the tokens that followed the earlier occurrence. So the last of these is the newest token.
        """
        token_ids, total = self.token_ids, len(self.token_ids)
        self._update_index()
        for size, ends in self._ends.items():
            last = token_ids[total - size :] if total - size >= self._first else []
            end = ends.get(hash(tuple(last))) if last else None
            if end is not None and token_ids[end - size : end] == last:  # another n-gram may have the same hash
                length = count if in_flight is None else len(in_flight) + 1 + count
                following = [*islice(cycle(token_ids[end : end + length]), length)]
                num_sampled = 0  # of the step in flight: its accepted drafts, and one more
                if in_flight is not None:
                    while num_sampled < len(in_flight) and in_flight[num_sampled] == following[num_sampled]:
                        num_sampled += 1
                    num_sampled += 1
                newest = following[num_sampled - 1] if num_sampled else last[-1]
                return newest, following[num_sampled : num_sampled + count]
        return -1, []

    def _update_index(self) -> None:
        """Add the n-grams that end before the last token. ``propose`` looks up the n-grams that end with it. After
        ``MAX_INDEXED`` new tokens, the next call continues.
        """
        token_ids, total = self.token_ids, min(len(self.token_ids), self._num_indexed + MAX_INDEXED)
        for size, ends in self._ends.items():
            for end in range(max(self._num_indexed, self._first + size), total):
                ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_indexed = total
