"""The processors of parameters that name or count tokens.

Sizes in ``BadWords``: B sequences of all rows, E tokens of all sequences without their last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32
from aioengine.protocol.messages import Sampling
from aioengine.runner.logits.grammar import apply_masks
from aioengine.runner.request_row import LogitsRow
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


def _token_indices(rows: list[LogitsRow], ids: Sequence[Ints32], upload: Upload) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens in the logits as rows [X] and token ids [X]. ids: the tokens of each row."""
    row_indices = np.repeat(np.array([row.index for row in rows]), [len(row_ids) for row_ids in ids])
    return upload(row_indices), upload(np.concatenate(ids).astype(np.int64))


_MAX_TOKENS: Final = 1 << 20
"""Maximum tokens compared at once, to limit memory."""


class BadWords:
    """If the last output tokens are a bad sequence without its last token, this last token is forbidden."""

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


class Penalties:
    """Penalties on a CPU: first frequency and presence for output tokens, then repetition for all tokens.

    On a GPU ``TokenCounts`` does this.
    """

    def wants(self, sampling: Sampling) -> bool:
        return sampling.has_penalties

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Penalize ``rows`` of logits [S, W]."""
        for row in rows:
            sampling, scores = row.request.sampling, logits[row.index]
            history = row.request.history[: row.num_tokens]
            if row.num_output > 0 and (sampling.frequency_penalty or sampling.presence_penalty):
                ids, counts = history[row.request.num_prompt :].unique(return_counts=True)
                scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
            if sampling.repetition_penalty != 1.0:
                ids, penalty = history[row.request.first_id :], sampling.repetition_penalty
                values = scores[ids]
                scores[ids] = torch.where(values < 0, values * penalty, values / penalty)
