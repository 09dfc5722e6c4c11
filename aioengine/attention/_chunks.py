"""The arithmetic of the backends for a CPU: attention over one chunk of positions, and how chunks are put together.

Shape letters: B products of a batch, M query rows, C positions of a chunk, E head size, X chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256
ROWS = 16
"""Query rows of prefill come in multiples of this, those of decode in multiples of what ``_padding`` finds."""
MASKED = -1.0e30
"""Added to the score of a position that a token may not see: its weight is zero, and a chunk without any position
that the token may see loses against all others.
"""

Part = tuple[Tensor, Tensor, Tensor]
"""Of one chunk: outputs [..., E], highest scores and highest probabilities [..., 1]."""


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def chunk_scores(queries: Tensor, keys: Tensor, hidden: Tensor | None, groups: tuple[int, int]) -> Tensor:
    """fp32 queries [B, M, E] and keys [B, C, E] -> scores [B, M, C]. Positions of a chunk after the last visible
    one can be left out.

    ``hidden`` [..., C] is added to the scores seen as [*groups, C].
    """
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if hidden is not None:
        scores.view(*groups, scores.shape[2]).add_(hidden)
    return scores


def attend_only(scores: Tensor, values: Tensor) -> Tensor:
    """Scores over all positions that there are: the result."""
    return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)


def attend_part(scores: Tensor, values: Tensor) -> Part:
    """Scores over one chunk of several."""
    probabilities = torch.softmax(scores, -1)
    outputs = torch.bmm(probabilities.to(values.dtype), values)
    return outputs, scores.amax(-1, keepdim=True), probabilities.amax(-1, keepdim=True)


def combine(part: Part) -> Tensor:
    """Parts stacked along the first axis, [X, ..., E] and [X, ..., 1] -> fp32 [..., E].

    A chunk's sum of exponentials is the inverse of its highest probability. The sums over chunks go by halves, so that
    chunks without weight at the end change no bit.
    """
    outputs, maxima, peaks = part
    weights = torch.exp(maxima - maxima.amax(0)).div_(peaks)
    weights = weights.div_(_sum_by_halves(weights.clone()))
    return _sum_by_halves(weights * outputs)


def _sum_by_halves(terms: Tensor) -> Tensor:
    """Sum over the first axis, in place."""
    count = terms.shape[0]
    while count > 1:
        half = 1 << (count - 1).bit_length() - 1
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]


def combine_sums(outputs: Tensor, sums: Tensor) -> Tensor:
    """Outputs of chunks [X, ..., E] and logarithms of their sums of exponentials [X, ...] -> fp32 [..., E]."""
    weights = torch.exp(sums - sums.amax(0))
    weights = weights.div_(_sum_by_halves(weights.clone()))
    return _sum_by_halves(weights.unsqueeze(-1) * outputs)
