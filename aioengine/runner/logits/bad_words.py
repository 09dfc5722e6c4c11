"""``bad_words``: if the last output tokens are a bad sequence without its last token, this last token is forbidden.

S rows, B sequences of all rows, E tokens of all sequences without their last tokens, R recent tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.request_row import LogitsRow
    from aioengine.runner.transfer import Upload

_MAX_TOKENS: Final = 1 << 20
"""Maximum tokens compared at once, to limit memory."""


class BadWords:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bad_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of tokens that would complete a sequence to -inf."""
        group: list[LogitsRow] = []
        size = 0
        for row in rows:
            row_size = len(row.request.lists.bad.prefixes)
            if group and size + row_size > _MAX_TOKENS:
                _forbid(logits, group, upload)
                group, size = [], 0
            group.append(row)
            size += row_size
        _forbid(logits, group, upload)


def _forbid(logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
    """Forbid tokens in ``rows`` of logits [S, W]."""
    sequences = [row.request.lists.bad for row in rows]
    counts = [len(bad.last) for bad in sequences]
    row_of_sequence = np.repeat(np.arange(len(rows)), counts)  # [B]
    firsts = np.cumsum([0, *counts[:-1]])
    owners = np.concatenate([bad.owner + first for bad, first in zip(sequences, firsts.tolist(), strict=True)])  # [E]
    recent = torch.stack([row.request.recent for row in rows])
    num_tokens = np.array([row.num_tokens for row in rows])
    row_of_token = row_of_sequence[owners]  # [E]
    positions = num_tokens[row_of_token] - np.concatenate([bad.distances for bad in sequences])
    actual = recent[upload(row_of_token), upload(positions % recent.shape[1])]
    differs = actual != upload(np.concatenate([bad.prefixes for bad in sequences]))
    num_different = torch.zeros(len(row_of_sequence), dtype=torch.int32, device=logits.device)
    num_different.index_add_(0, upload(owners), differs.int())
    bans = torch.where(num_different == 0, -torch.inf, 0.0)
    indices = np.array([row.index for row in rows])[row_of_sequence]
    ids = np.concatenate([bad.last for bad in sequences]).astype(np.int64)
    # several sequences may end with the same token, hence ``accumulate``
    logits.index_put_((upload(indices), upload(ids)), bans, accumulate=True)
