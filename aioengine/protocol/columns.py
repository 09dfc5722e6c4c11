"""TokenColumns: the tokens of one step as columns, from the runner to the frontend.

The scheduler and the detokenizer pass on what they do not need to read. So a further result of a token, such as its
logprobs, is a new kind of ``Extra`` and changes nothing between the runner and the reader of it.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, repeat
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NO_TOKEN: Final = -1
"""``Extra.index`` of what belongs to the prompt, or to the whole request."""

POOLED_VECTOR: Final = "vector"
"""``Extra.kind`` of the vector of a pooled request."""


HIDDEN_STATES: Final = "hidden_states"
"""``Extra.kind`` of the hidden state, [D] fp32, of the position that gave a token."""

PROMPT_STATES: Final = "prompt_states"
"""``Extra.kind`` of the hidden states, [positions, D] fp32, of the prompt before its last position, in blocks
(``state_extras``). ``Extra.index`` is the first position of the block.
"""

STATE_BLOCK_BYTES: Final = 64 * 1024
"""Of the hidden states of a prompt, at least one position: so much is read at once."""


class BadColumnsError(ValueError):
    """The columns of a message or of a step's result contradict each other, or what was asked for."""


class Extra(Struct, frozen=True, array_like=True, gc=False):
    """Something beside the id of a token.

    Attributes:
        uid: the request.
        index: of the output token that it belongs to, from 0 for the first token behind the prompt, or ``NO_TOKEN``;
            where ``kind`` says so, of a position of the prompt. A step that is computed again gives the same extra,
            which then replaces the first.
        kind: a name known to the runner and to the reader; a token has at most one extra of each kind.
        data: its value, in a format that belongs to ``kind``.
    """

    uid: int
    index: Annotated[int, Meta(ge=NO_TOKEN)]
    kind: str
    data: bytes


class TokenColumns(Struct, array_like=True, gc=False):
    """Tokens by request: ``counts[i]`` of the flat ``token_ids`` belong to ``uids[i]``.

    Attributes:
        uids: the requests. token_ids: their new tokens. counts: how many each has; None: one each.
        extras: sparse, in any order. They never come later than their token, but may come earlier.

    Raises:
        BadColumnsError: the lengths contradict each other.
    """

    uids: list[int] = []
    token_ids: list[int] = []
    counts: list[int] | None = None
    extras: list[Extra] = []

    def __post_init__(self) -> None:
        counts = self.counts
        if counts is None:
            if len(self.uids) != len(self.token_ids):
                raise BadColumnsError(f"{len(self.uids)} uids and {len(self.token_ids)} token ids without counts")
        elif len(self.uids) != len(counts) or sum(counts) != len(self.token_ids) or min(counts, default=0) < 0:
            raise BadColumnsError(
                f"{len(self.uids)} uids, {len(counts)} counts, the least of them {min(counts, default=0)}, and "
                f"{len(self.token_ids)} token ids, not {sum(counts)}"
            )

    def add(self, uid: int, token_ids: Sequence[int]) -> None:
        """Append a row."""
        counts = self.counts
        if counts is not None:
            counts.append(len(token_ids))
        elif len(token_ids) != 1:
            self.counts = [*repeat(1, len(self.uids)), len(token_ids)]
        self.uids.append(uid)
        self.token_ids += token_ids

    def rows(self) -> Iterable[int | list[int]]:
        """What each row has: its token as an int where every row has one, else lists."""
        if self.counts is None:
            return self.token_ids
        ends = accumulate(self.counts, initial=0)
        return (self.token_ids[start:end] for start, end in pairwise(ends))

    def uid_of_each(self) -> Iterable[int]:
        """The uid of each of ``token_ids``."""
        return self.uids if self.counts is None else chain.from_iterable(map(repeat, self.uids, self.counts))

    def limited(self, limits: Mapping[int, int]) -> TokenColumns:
        """The same with at most ``limits[uid]`` tokens for each uid in ``limits``; with 0 neither row nor extras."""
        if not limits:
            return self
        kept = TokenColumns(extras=[extra for extra in self.extras if limits.get(extra.uid) != 0])
        for uid, new in zip(self.uids, self.rows(), strict=True):
            if (limit := limits.get(uid)) != 0:
                kept.add(uid, [new] if isinstance(new, int) else new[:limit])
        return kept


def state_extras(uid: int, data: bytes, position_bytes: int) -> list[Extra]:
    """The hidden states of a prompt before its last position, packed, as extras of a bounded size each."""
    count = max(1, STATE_BLOCK_BYTES // position_bytes)
    starts = range(0, len(data), count * position_bytes)
    blocks = (data[start : start + count * position_bytes] for start in starts)
    return [Extra(uid, place * count, PROMPT_STATES, block) for place, block in enumerate(blocks)]
