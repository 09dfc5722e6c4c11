"""Accepts drafts by the tokens that are sampled at their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.runner.sampling.sampler import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Verification:
    """Compares the tokens that S rows sample with their drafts.

    Some rows sample one position after the other, because a token depends on the tokens before (penalties, grammars),
    or because something is returned for it (logprobs). Other rows sample all positions at once.

    Attributes:
        counts: number of accepted drafts of each row so far.
        final: the last token of each row so far; FAILED: it cannot be sampled.
        active: the rows that are not done.
    """

    def __init__(self, drafts: Sequence[Sequence[int]], one_by_one: list[bool]) -> None:
        """drafts: of each row; may be empty."""
        self.drafts = drafts
        self.counts = [0] * len(drafts)
        self.final = [FAILED] * len(drafts)
        self.active = list(range(len(drafts)))
        self._one_by_one = one_by_one

    def entries(self) -> list[tuple[int, int]]:
        """Return the positions to sample next, as pairs of a row and the number of drafts before the position. Call
        ``take`` with their tokens.
        """
        active, self.active = self.active, []
        entries: list[tuple[int, int]] = []
        for row in active:
            first = self.counts[row]
            last = first if self._one_by_one[row] else len(self.drafts[row])
            entries += [(row, count) for count in range(first, last + 1)]
        return entries

    def take(self, entries: list[tuple[int, int]], token_ids: list[int]) -> dict[int, int]:
        """Accept drafts by the tokens of these entries. Return row -> index of its last entry whose token counts.

        A token that cannot be sampled after an accepted draft does not count: the next step samples it again.
        """
        kept: dict[int, int] = {}
        is_open = dict.fromkeys((row for row, _ in entries), True)
        for index, ((row, count), token_id) in enumerate(zip(entries, token_ids, strict=True)):
            if not is_open[row]:
                continue
            if token_id == FAILED and count:
                self.counts[row] = count - 1
                is_open[row] = False
                continue
            kept[row] = index
            self.counts[row], self.final[row] = count, token_id
            drafts = self.drafts[row]
            is_open[row] = count < len(drafts) and token_id == drafts[count]
            if is_open[row] and self._one_by_one[row]:
                self.counts[row] = count + 1
                self.active.append(row)
        return kept

    def stop(self, row: int) -> None:
        """End an active row with the token of its last entry."""
        self.active.remove(row)
        self.counts[row] -= 1


def num_accepted(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the number of accepted drafts of a row. token_ids: sampled at their positions, and after the last one."""
    count = 0
    while count < len(drafts) and token_ids[count] == drafts[count]:
        count += 1
    return count - (token_ids[count] == FAILED and count > 0)  # as in ``Verification.take``


def row_groups(counts: Sequence[int], most: int) -> Iterator[range]:
    """Divide rows into groups with up to ``most`` positions. counts: positions of each row."""
    start = num_positions = 0
    for row, count in enumerate(counts):
        if num_positions and num_positions + count > most:
            yield range(start, row)
            start, num_positions = row, 0
        num_positions += count
    if start < len(counts):
        yield range(start, len(counts))
