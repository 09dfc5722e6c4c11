"""Penalties on a CPU: frequency and presence penalties for output tokens, then the repetition penalty for all tokens.

On a GPU ``runner.sampling.token_counts`` does this.

The tokens of all rows are one flat list of (row, id) pairs. Its length depends on the histories, not on the vocabulary.
Duplicate pairs are harmless: they get the same new value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.request_row import LogitsRow
    from aioengine.runner.transfer import Upload


class Penalties:
    """Keeps a count table in the shape of the logits, which is 0 between calls."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0)

    def wants(self, sampling: Sampling) -> bool:
        return sampling.has_penalties

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Penalize rows of logits [S, W]."""
        counted = [
            row
            for row in rows
            if row.num_output > 0 and (row.request.sampling.frequency_penalty or row.request.sampling.presence_penalty)
        ]
        if counted:
            self._penalize_counts(logits, counted)
        repeated = [row for row in rows if row.request.sampling.repetition_penalty != 1.0]
        if repeated:
            _penalize_repetition(logits, repeated)

    def _penalize_counts(self, logits: Tensor, rows: list[LogitsRow]) -> None:
        """Apply frequency and presence penalties to rows of logits [S, W]."""
        if self._counts.shape[0] < logits.shape[0] or self._counts.shape[1] != logits.shape[1]:
            self._counts = torch.zeros_like(logits)
        pairs, lengths = _pairs(rows, [row.request.num_prompt for row in rows])
        self._counts.index_put_(pairs, torch.ones((), device=logits.device), accumulate=True)
        counts = self._counts[pairs]
        self._counts.index_put_(pairs, torch.zeros((), device=logits.device))
        frequency = _repeat([row.request.sampling.frequency_penalty for row in rows], lengths)
        presence = _repeat([row.request.sampling.presence_penalty for row in rows], lengths)
        logits.index_put_(pairs, logits[pairs] - (frequency * counts + presence))


def _penalize_repetition(logits: Tensor, rows: list[LogitsRow]) -> None:
    """Apply the repetition penalty to rows of logits [S, W]."""
    pairs, lengths = _pairs(rows, [row.request.first_id for row in rows])
    penalty = _repeat([row.request.sampling.repetition_penalty for row in rows], lengths)
    values = logits[pairs]
    logits.index_put_(pairs, torch.where(values < 0, values * penalty, values / penalty))


def _pairs(rows: list[LogitsRow], starts: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the tokens from ``starts`` on as (row indices [X], ids [X]), and the number of tokens per row [rows]."""
    parts = [row.request.history[start : row.num_tokens] for row, start in zip(rows, starts, strict=True)]
    ids = torch.cat(parts)
    lengths = torch.tensor([len(part) for part in parts], device=ids.device)
    indices = torch.tensor([row.index for row in rows], device=ids.device)
    return (indices.repeat_interleave(lengths, output_size=len(ids)), ids), lengths


def _repeat(values: list[float], lengths: Tensor) -> Tensor:
    """Repeat the value of each row for each of its tokens -> [X]. lengths: [rows] number of tokens."""
    return torch.tensor(values, device=lengths.device).repeat_interleave(lengths)
