"""TokenColumns: the tokens of one step as columns, from the runner to the frontend.

The scheduler and the detokenizer forward ``Extra``s without reading them. So a new result per token, such as logprobs,
is a new kind of ``Extra``: only the runner and its reader change.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, repeat
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NO_TOKEN: Final = -1
"""``Extra.index`` if the extra belongs to the prompt, or to the request."""

POOLED_VECTOR: Final = "vector"
"""``Extra.kind`` of the vector of a pooled request."""


HIDDEN_STATES: Final = "hidden_states"
"""``Extra.kind`` of the hidden state [D] fp32 from which a token was sampled."""

PROMPT_STATES: Final = "prompt_states"
"""``Extra.kind`` of hidden states [positions, D] fp32 of the prompt without its last position, in blocks
(``state_extras``). ``Extra.index`` is the first position of the block.
"""

STATE_BLOCK_BYTES: Final = 64 * 1024
"""Maximum bytes of hidden states in one extra; at least one position."""


class BadColumnsError(ValueError):
    """The columns of a message or of a step result do not match each other, or the rows of the plan."""


class Extra(Struct, frozen=True, array_like=True, gc=False):
    """A result of a token in addition to its id.

    Attributes:
        uid: the request.
        index: index of its output token (0: the first token after the prompt), or ``NO_TOKEN``. For some kinds, a
            position of the prompt. A step that is computed again returns the same extra, which replaces the first.
        kind: a name known to the runner and to the reader. A token has at most one extra of each kind.
        data: its value; ``kind`` determines the format.
    """

    uid: int
    index: Annotated[int, Meta(ge=NO_TOKEN)]
    kind: str
    data: bytes


class TokenColumns(Struct, array_like=True, gc=False):
    """Tokens by request: ``counts[i]`` of the flat ``token_ids`` belong to ``uids[i]``.

    Attributes:
        uids: the requests. token_ids: their new tokens. counts: number of tokens of each request; None: one each.
        extras: in any order. They may come before their token, but never after it.

    Raises:
        BadColumnsError: the lengths do not match.
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
        """Return the token of each row if every row has one, else a list of tokens for each row."""
        if self.counts is None:
            return self.token_ids
        ends = accumulate(self.counts, initial=0)
        return (self.token_ids[start:end] for start, end in pairwise(ends))

    def uid_of_each(self) -> Iterable[int]:
        """Return the uid of each token."""
        return self.uids if self.counts is None else chain.from_iterable(map(repeat, self.uids, self.counts))

    def limited(self, limits: Mapping[int, int]) -> TokenColumns:
        """Return at most ``limits[uid]`` tokens for each uid in ``limits``. With 0, its row and extras are removed."""
        if not limits:
            return self
        kept = TokenColumns(extras=[extra for extra in self.extras if limits.get(extra.uid) != 0])
        for uid, new in zip(self.uids, self.rows(), strict=True):
            if (limit := limits.get(uid)) != 0:
                kept.add(uid, [new] if isinstance(new, int) else new[:limit])
        return kept


def state_extras(uid: int, data: bytes, position_bytes: int) -> list[Extra]:
    """Return packed hidden states of a prompt, without its last position, as extras of limited size."""
    count = max(1, STATE_BLOCK_BYTES // position_bytes)
    starts = range(0, len(data), count * position_bytes)
    blocks = (data[start : start + count * position_bytes] for start in starts)
    return [Extra(uid, place * count, PROMPT_STATES, block) for place, block in enumerate(blocks)]
