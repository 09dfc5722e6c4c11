"""The processors of parameters with token ids: ``logit_bias``, ``min_new_tokens`` and ``allowed_token_ids``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.runner.logits.grammar import apply_masks
from aioengine.runner.token_lists import token_indices

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload

_LEAST = -1e30
"""Finite, even divided by a temperature: if all tokens are stop tokens, one of them is sampled."""


class Bias:
    """Adds numbers to the logits of chosen tokens."""

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bias_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Add the biases to logits [S, W]."""
        lists = [row.lists for row in rows if row.lists is not None]
        indices = token_indices([row.index for row in rows], [row_lists.bias_ids for row_lists in lists], upload)
        values = np.concatenate([row_lists.bias for row_lists in lists])
        logits.index_put_(indices, upload(values), accumulate=True)


class MinNewTokens:
    """Stop tokens are not sampled before ``min_new_tokens`` output tokens, unless no other token is possible."""

    def wants(self, sampling: Sampling) -> bool:
        return sampling.min_new_tokens > 0 and bool(sampling.suppressed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Lower the logits [S, W] of suppressed tokens."""
        early = [row for row in rows if row.num_output < row.sampling.min_new_tokens]
        if early:
            suppressed = [row.lists.suppressed for row in early if row.lists is not None]
            indices = token_indices([row.index for row in early], suppressed, upload)
            logits.index_put_(indices, upload(np.full(1, _LEAST, dtype=np.float32)))


class AllowedTokenIds:
    """Forbids all other tokens."""

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.allowed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of all other tokens to -inf."""
        row_masks = {row.index: row.lists.allowed for row in rows if row.lists is not None}
        rules = [(index, -1 - mask_index) for mask_index, index in enumerate(row_masks)]
        masks = torch.stack([mask for mask in row_masks.values() if mask is not None])
        apply_masks(logits, upload(np.array(rules, dtype=np.int32)), masks)
