"""The processors of parameters with token ids: ``logit_bias``, ``min_new_tokens`` and ``allowed_token_ids``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.runner.logits.grammar import apply_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.request_row import LogitsRow
    from aioengine.runner.token_lists import Ints
    from aioengine.runner.transfer import Upload

_LEAST = -1e30
"""Finite, even divided by a temperature: if all tokens are stop tokens, one of them is sampled."""


class Bias:
    """Adds numbers to the logits of chosen tokens."""

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.bias_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Add the biases to logits [S, W]."""
        indices = _token_indices(rows, [row.request.lists.bias_ids for row in rows], upload)
        values = np.concatenate([row.request.lists.bias for row in rows])
        logits.index_put_(indices, upload(values), accumulate=True)


class MinNewTokens:
    """Stop tokens are not sampled before ``min_new_tokens`` output tokens, unless no other token is possible."""

    def wants(self, sampling: Sampling) -> bool:
        return sampling.min_new_tokens > 0 and bool(sampling.suppressed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Lower the logits [S, W] of suppressed tokens."""
        early = [row for row in rows if row.num_output < row.request.sampling.min_new_tokens]
        if early:
            indices = _token_indices(early, [row.request.lists.suppressed for row in early], upload)
            logits.index_put_(indices, upload(np.full(1, _LEAST, dtype=np.float32)))


class AllowedTokenIds:
    """Forbids all other tokens."""

    def wants(self, sampling: Sampling) -> bool:
        return bool(sampling.allowed_token_ids)

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of all other tokens to -inf."""
        rules = np.array([(row.index, -1 - mask_index) for mask_index, row in enumerate(rows)], dtype=np.int32)
        apply_masks(logits, upload(rules), torch.stack([row.request.lists.allowed for row in rows]))


def _token_indices(rows: list[LogitsRow], ids: Sequence[Ints], upload: Upload) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens in the logits as rows [X] and token ids [X]. ids: the tokens of each row."""
    row_indices = np.repeat(np.array([row.index for row in rows]), [len(row_ids) for row_ids in ids])
    return upload(row_indices), upload(np.concatenate(ids).astype(np.int64))
