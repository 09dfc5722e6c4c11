"""``bad_words``: if the last output tokens are a bad sequence without its last token, this last token is forbidden.

S rows, B sequences of all rows, E tokens of all sequences without their last tokens, R recent tokens.
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
"""Maximum tokens compared at once, to limit memory."""


class BadWords:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bad_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of tokens that would complete a sequence to -inf."""
        for group in _groups(rows):
            _apply(logits, group, upload)


def _apply(logits: Tensor, rows: list[tuple[LogitsRow, BadSequences, Tensor]], upload: Upload) -> None:
    """Forbid tokens in rows of logits [S, W]. rows: (row, its sequences, its recent tokens [R])."""
    sequences = [bad for _, bad, _ in rows]
    counts = [len(bad.last) for bad in sequences]
    row_of_sequence = np.repeat(np.arange(len(rows)), counts)  # [B]
    firsts = np.cumsum([0, *counts[:-1]])
    owners = np.concatenate([bad.owner + first for bad, first in zip(sequences, firsts.tolist(), strict=True)])  # [E]
    recent = torch.stack([recent for _, _, recent in rows])
    num_tokens = np.array([row.num_tokens for row, _, _ in rows])
    row_of_token = row_of_sequence[owners]  # [E]
    positions = num_tokens[row_of_token] - np.concatenate([bad.distances for bad in sequences])
    actual = recent[upload(row_of_token), upload(positions % recent.shape[1])]
    differs = actual != upload(np.concatenate([bad.prefixes for bad in sequences]))
    num_different = torch.zeros(len(row_of_sequence), dtype=torch.int32, device=logits.device)
    num_different.index_add_(0, upload(owners), differs.int())
    bans = torch.where(num_different == 0, -torch.inf, 0.0)
    indices = np.array([row.index for row, _, _ in rows])[row_of_sequence]
    ids = np.concatenate([bad.last for bad in sequences]).astype(np.int64)
    # several sequences may end with the same token, hence ``accumulate``
    logits.index_put_((upload(indices), upload(ids)), bans, accumulate=True)


def _groups(rows: list[LogitsRow]) -> Iterator[list[tuple[LogitsRow, BadSequences, Tensor]]]:
    """Yield rows with their sequences and recent tokens [R], in groups of up to ``_MAX_TOKENS`` tokens."""
    group: list[tuple[LogitsRow, BadSequences, Tensor]] = []
    size = 0
    for row in rows:
        if row.lists is None or row.lists.bad is None or row.recent is None:
            continue
        size += len(row.lists.bad.prefixes)
        if group and size > _MAX_TOKENS:
            yield group
            group, size = [], len(row.lists.bad.prefixes)
        group.append((row, row.lists.bad, row.recent))
    if group:
        yield group


PLUGIN = BadWords
