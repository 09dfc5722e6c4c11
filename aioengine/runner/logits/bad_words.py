"""``bad_words``: the last token of a sequence cannot be drawn behind the others of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload

_ANY = -1  # matches every token


class BadWords:
    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bad_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the tokens that would complete a sequence to -inf in logits [S, W]."""
        for row in rows:
            sequences = [ids for ids in row.sampling.bad_token_ids if len(ids) <= row.num_tokens + 1]
            if not sequences or row.history is None:
                continue
            # B sequences, behind the last N tokens
            length = max(map(len, sequences))
            padded = np.array([(_ANY,) * (length - len(ids)) + ids for ids in sequences], dtype=np.int64)
            before_BN, last_B = upload(padded[:, :-1]), upload(padded[:, -1].copy())
            newest_N = row.history[row.num_tokens - length + 1 : row.num_tokens]
            is_complete_B = ((before_BN == newest_N) | (before_BN == _ANY)).all(-1)
            bans_B = torch.where(is_complete_B, -torch.inf, 0.0)
            logits[row.index].index_add_(0, last_B, bans_B)  # several sequences may end with the same token


PLUGIN = BadWords
