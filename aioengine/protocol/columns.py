"""TokenColumns: the tokens of one step as columns, from the runner to the frontend.

A result of a token in addition to its id, such as its logprobs, is an ``Extra``. The scheduler and the detokenizer
forward the kinds of extras that they do not know. So a new kind changes only the runner and the reader in the frontend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise, repeat
from struct import Struct as Format
from typing import Annotated, Final

from msgspec import Meta, Struct

NO_TOKEN: Final = -1
"""``Extra.index`` if the extra belongs to the prompt, or to the request."""

POOLED_VECTOR: Final = "vector"
"""``Extra.kind`` of the vector of a pooled request."""


HIDDEN_STATES: Final = "hidden_states"
"""``Extra.kind`` of the hidden state [D] fp32 from which a token was sampled."""

PROMPT_STATES: Final = "prompt_states"
"""``Extra.kind`` of hidden states [positions, D] fp32 of the prompt without its last position, in blocks
(``block_extras``). ``Extra.index`` is the first position of the block.
"""

DRAFTS: Final = "drafts"
"""``Extra.kind`` of the first token of a row with drafts: how many drafts were proposed, and how many accepted. The
accepted drafts are this token and the next ones.
"""

WEIGHT_VERSION: Final = "weight_version"
"""``Extra.kind`` of the version of the weights (text), at the first token of an output that they computed. Rows whose
weights do not change have none.
"""

_DRAFT_FORMAT: Final = Format("<HH")

BLOCK_BYTES: Final = 64 * 1024
"""Maximum bytes of a block. A block has at least one position, even if that is larger. Reading 64 KiB of logprobs takes
some milliseconds."""


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
    """

    uids: list[int] = []
    token_ids: list[int] = []
    counts: list[int] | None = None
    extras: list[Extra] = []

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
        """Return the tokens of each row: an int per row if all rows have one token, else a list per row."""
        if self.counts is None:
            return self.token_ids
        ends = accumulate(self.counts, initial=0)
        return (self.token_ids[start:end] for start, end in pairwise(ends))

    def uid_of_each(self) -> Iterable[int]:
        """Return the uid of each token."""
        return self.uids if self.counts is None else chain.from_iterable(map(repeat, self.uids, self.counts))

    def limited(self, limits: Mapping[int, int]) -> TokenColumns:
        """Return at most ``limits[uid]`` tokens for each uid in ``limits``. With 0, its row and extras are removed."""
        kept = TokenColumns(extras=[extra for extra in self.extras if limits.get(extra.uid) != 0])
        for uid, new in zip(self.uids, self.rows(), strict=True):
            if (limit := limits.get(uid)) != 0:
                kept.add(uid, [new] if isinstance(new, int) else new[:limit])
        return kept


def draft_extra(uid: int, index: int, num_proposed: int, num_accepted: int) -> Extra:
    """Return the extra of kind ``DRAFTS`` of a row with drafts. index: of its first token."""
    return Extra(uid, index, DRAFTS, _DRAFT_FORMAT.pack(num_proposed, num_accepted))


def draft_counts(extra: Extra) -> tuple[int, int]:
    """Return the numbers of proposed and of accepted drafts."""
    num_proposed, num_accepted = _DRAFT_FORMAT.unpack(extra.data)
    return num_proposed, num_accepted


def block_extras(uid: int, kind: str, data: bytes, position_bytes: int) -> list[Extra]:
    """Return the packed values of the positions of a prompt as extras with a limited number of positions.

    position_bytes: size of the values of one position.
    """
    num_positions = max(1, BLOCK_BYTES // position_bytes)  # in a block
    starts = range(0, len(data), num_positions * position_bytes)
    blocks = (data[start : start + num_positions * position_bytes] for start in starts)
    return [Extra(uid, number * num_positions, kind, block) for number, block in enumerate(blocks)]
