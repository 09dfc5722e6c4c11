"""``bad_words``: where a request has written all tokens of a bad sequence but the last, that one is ruled out.

Shape letters: S rows, B sequences of all rows, E tokens of all sequences without the last of each, R recent tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.token_lists import BadSequences
    from aioengine.runner.transfer import Upload

_MAX_TOKENS: Final = 1 << 20
"""The most tokens that are compared at a time: a bound on memory."""


class BadWords:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bad_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the tokens that would complete a sequence to -inf in logits [S, W]."""
        for group in _groups(rows):
            _apply(logits, group, upload)


def _apply(logits: Tensor, rows: list[tuple[LogitsRow, BadSequences, Tensor]], upload: Upload) -> None:
    """Rule tokens out of rows of logits [S, W]; each comes with its sequences and its recent tokens [R]."""
    given = [bad for _, bad, _ in rows]
    counts = [len(bad.last) for bad in given]
    places = np.repeat(np.arange(len(rows)), counts)  # [B] the row of each sequence
    firsts = np.cumsum([0, *counts[:-1]])
    # [E] the sequence of each token
    owners = np.concatenate([bad.owner + first for bad, first in zip(given, firsts.tolist(), strict=True)])
    recent = torch.stack([recent for _, _, recent in rows])
    num_tokens = np.array([row.num_tokens for row, _, _ in rows])
    positions = num_tokens[places[owners]] - np.concatenate([bad.back for bad in given])
    standing = recent[upload(places[owners]), upload(positions % recent.shape[1])]
    is_missing = standing != upload(np.concatenate([bad.others for bad in given]))
    num_missing = torch.zeros(len(places), dtype=torch.int32, device=logits.device)
    num_missing.index_add_(0, upload(owners), is_missing.int())
    bans = torch.where(num_missing == 0, -torch.inf, 0.0)
    indices = np.array([row.index for row, _, _ in rows])[places]
    ids = np.concatenate([bad.last for bad in given]).astype(np.int64)
    # Several sequences may end with the same token, hence ``accumulate``.
    logits.index_put_((upload(indices), upload(ids)), bans, accumulate=True)


def _groups(rows: list[LogitsRow]) -> Iterator[list[tuple[LogitsRow, BadSequences, Tensor]]]:
    """The rows with their sequences and recent tokens [R], in groups of up to ``_MAX_TOKENS`` tokens."""
    group: list[tuple[LogitsRow, BadSequences, Tensor]] = []
    size = 0
    for row in rows:
        if row.lists is None or row.lists.bad is None or row.recent is None:
            continue
        size += len(row.lists.bad.others)
        if group and size > _MAX_TOKENS:
            yield group
            group, size = [], len(row.lists.bad.others)
        group.append((row, row.lists.bad, row.recent))
    if group:
        yield group


PLUGIN = BadWords
