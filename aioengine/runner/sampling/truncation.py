"""Truncation by top-k, then top-p, then min-p, and sampling on a CPU.

The result of a row does not depend on other rows. The rules, for a row of fp32 probabilities p in vocabulary order,
with ties broken by vocabulary order:

- top-k keeps the k largest probabilities. From these, top-p keeps a token if the mass of the larger ones is less than
  ``top_p`` times their total mass. From these, min-p keeps tokens with at least ``min_p`` times the largest
  probability.
- Sampling inverts the cumulative distribution of the kept tokens in vocabulary order: it returns the first token at
  which the cumulative mass exceeds ``uniform`` times the total mass.

Sorting a vocabulary would cost milliseconds per row. Instead, the largest probabilities (the head) are searched in the
interleaved blocks with the largest maxima. The head is complete down to the largest maximum of the other blocks. Rows
for which it is not enough (flat distributions) use an exact histogram. The head is processed in numpy, whose small
operations cost a tenth of torch's.

S rows, W width of a row (a multiple of BLOCK), B blocks, C tokens of a block, H head, N maximum number of kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints64

Floats = npt.NDArray[np.float64]

BLOCK = 64
"""The width of rows is a multiple of this."""

_NUM_BLOCKS = 128  # blocks whose tokens are candidates for the head
_HEAD = 256
_NO_TOKEN = 1 << 40  # larger than all token ids


@dataclass(frozen=True, slots=True)
class _LargestTokens:
    """The largest probabilities of S rows in descending order, with their ids (ties in any order), and the largest
    probability that may be missing.
    """

    values_SH: Floats
    ids_SH: Ints64
    missing_S: Floats


def draw(p_SW: Tensor, uniform_S: Floats) -> Ints64:
    """Sample one token id per row, [S], from the full distribution. uniform_S: in [0, 1).

    The mass is accumulated over blocks (summed in fp32), then within the chosen block.
    """
    blocks_SBC = torch.unflatten(p_SW, -1, (-1, BLOCK))
    mass_SB = _wide(blocks_SBC.sum(-1)).cumsum(-1)
    target_S = uniform_S * mass_SB[:, -1]
    block_S = _first_above(mass_SB, target_S)
    rows = np.arange(len(block_S))
    before_S = np.where(block_S > 0, mass_SB[rows, block_S - 1], 0.0)
    inside_SC = blocks_SBC[torch.from_numpy(rows), torch.from_numpy(block_S)]
    return block_S * BLOCK + _first_above(_wide(inside_SC).cumsum(-1), target_S - before_S)


def draw_truncated(p_SW: Tensor, uniform_S: Floats, rules_S: npt.NDArray[np.void]) -> Ints64:
    """Sample one token id per row, [S], after top-k, top-p and min-p. rules_S: of ``rows.SAMPLING_RECORD``."""
    head = _find_head(p_SW)
    num_S, is_sure_S = _count_kept(head, rules_S, p_SW.shape[-1])
    values_SN, ids_SN = _kept_of_head(p_SW, head, num_S)
    order_SN = ids_SN.argsort(-1)
    ids_SN = np.take_along_axis(ids_SN, order_SN, -1)
    mass_SN = np.take_along_axis(values_SN, order_SN, -1).cumsum(-1)
    token_S: Ints64 = ids_SN[np.arange(len(ids_SN)), _first_above(mass_SN, uniform_S * mass_SN[:, -1])]
    for i in np.flatnonzero(~is_sure_S).tolist():
        p_W = p_SW[i].numpy()
        rules = rules_S[i]
        keep_W = kept(p_W, top_k=int(rules["top_k"]), top_p=float(rules["top_p"]), min_p=float(rules["min_p"]))
        token_S[i] = _draw_kept(p_W, keep_W, float(uniform_S[i]))
    return token_S


def _find_head(p_SW: Tensor) -> _LargestTokens:
    """Return the head [S, H] of probabilities [S, W]."""
    num_blocks = p_SW.shape[-1] // BLOCK
    if num_blocks <= _NUM_BLOCKS:
        largest = p_SW.topk(min(_HEAD, p_SW.shape[-1]))
        missing_S = np.zeros(len(p_SW))
        return _LargestTokens(_wide(largest.values), largest.indices.numpy(), missing_S)
    # Block b has the tokens b, b + B, b + 2 B, ..., so that maxima are computed along contiguous memory.
    grid_SCB = torch.unflatten(p_SW, -1, (BLOCK, num_blocks))
    best = grid_SCB.amax(1).topk(_NUM_BLOCKS + 1)
    taken_SB = best.indices[:, :_NUM_BLOCKS]
    candidates = grid_SCB.gather(2, taken_SB[:, None, :].expand(-1, BLOCK, -1)).flatten(1)
    largest = candidates.topk(_HEAD)
    indices_SH = largest.indices.numpy()
    blocks_SH = np.take_along_axis(taken_SB.numpy(), indices_SH % _NUM_BLOCKS, -1)
    return _LargestTokens(
        _wide(largest.values), indices_SH // _NUM_BLOCKS * num_blocks + blocks_SH, _wide(best.values[:, -1])
    )


def _count_kept(
    head: _LargestTokens, rules_S: npt.NDArray[np.void], width: int
) -> tuple[Ints64, npt.NDArray[np.bool_]]:
    """Return the number of kept tokens in the head [S], at least 1, and whether it surely has all kept tokens [S]."""
    values_SH, top_k_S, top_p_S = head.values_SH, rules_S["top_k"], rules_S["top_p"]
    size = values_SH.shape[-1]
    rows = np.arange(len(values_SH))
    mass_SH = values_SH.cumsum(-1)
    is_short_S = top_k_S <= size  # the head contains the complete top-k set
    total_S = np.where(is_short_S, mass_SH[rows, np.minimum(top_k_S, size) - 1], 1.0)
    limit_S = np.where(top_p_S < 1.0, top_p_S * total_S, np.inf)  # infinite: rounding must not drop tokens
    num_S = (mass_SH - values_SH < limit_S[:, None]).sum(-1)
    num_S = np.minimum(num_S, (values_SH >= (rules_S["min_p"] * values_SH[:, 0])[:, None]).sum(-1))
    num_S = np.maximum(np.minimum(num_S, top_k_S), 1)
    has_mass_S = is_short_S | (top_k_S >= width) | (top_p_S >= 1.0)
    is_complete_S = is_short_S | (num_S < size)
    return num_S, has_mass_S & is_complete_S & (values_SH[rows, num_S - 1] >= head.missing_S)


def _kept_of_head(p_SW: Tensor, head: _LargestTokens, num_S: Ints64) -> tuple[Floats, Ints64]:
    """Return probabilities (0 for padding) and ids [S, N] of kept tokens. Ties at the threshold: the first ids are
    kept.
    """
    size = int(num_S.max())
    is_kept_SN = np.arange(size) < num_S[:, None]
    values_SN = np.where(is_kept_SN, head.values_SH[:, :size], 0.0)
    ids_SN = np.where(is_kept_SN, head.ids_SH[:, :size], _NO_TOKEN)
    rows = np.arange(len(num_S))
    threshold_S = head.values_SH[rows, num_S - 1]
    next_S = head.values_SH[rows, np.minimum(num_S, head.values_SH.shape[-1] - 1)]
    for i in np.flatnonzero((next_S == threshold_S) | (head.missing_S == threshold_S)).tolist():
        num_larger = int((values_SN[i] > threshold_S[i]).sum())
        equal = (p_SW[i] == float(threshold_S[i])).nonzero()[: int(num_S[i]) - num_larger, 0]
        ids_SN[i, num_larger : num_larger + len(equal)] = equal.numpy()
    return values_SN, ids_SN


def kept(p_W: npt.NDArray[np.float32], *, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Return which tokens of one row of probabilities [W] are kept, [W]. Exact for every distribution."""
    keep_W = np.ones(len(p_W), dtype=np.bool_)
    total = 1.0
    if top_k < len(p_W):
        keep_W = _head(p_W, np.ones(len(p_W)), float(top_k))
        p_W = np.where(keep_W, p_W, np.float32(0))
        total = float(p_W.sum(dtype=np.float64))
    if top_p < 1.0:
        keep_W &= _head(p_W, p_W.astype(np.float64), top_p * total)
    keep_W &= p_W >= min_p * float(p_W.max())
    keep_W[p_W.argmax()] = True
    return keep_W


def _head(p_W: npt.NDArray[np.float32], weights_W: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Return a mask [W]: a token is kept if the total weight of tokens with larger probabilities is less than
    ``limit``.

    Only the histogram bin in which the limit is reached is sorted. The bin of a probability is the upper half of its
    bits, because larger probabilities have larger bits.
    """
    bins_W = p_W.view(np.int32) >> 16
    weight_of_bin = np.bincount(bins_W, weights_W)
    above = weight_of_bin[::-1].cumsum()[::-1] - weight_of_bin
    threshold = int(np.flatnonzero(above < limit)[0])
    inside = np.flatnonzero(bins_W == threshold)
    inside = inside[np.argsort(-p_W[inside], kind="stable")]
    before = above[threshold] + np.cumsum(weights_W[inside]) - weights_W[inside]
    keep_W = bins_W > threshold
    keep_W[inside[before < limit]] = True
    return keep_W


def _draw_kept(p_W: npt.NDArray[np.float32], keep_W: npt.NDArray[np.bool_], uniform: float) -> int:
    """Sample one token id from probabilities [W] where ``keep_W`` [W]."""
    mass_W = np.where(keep_W, p_W, np.float32(0)).cumsum(dtype=np.float64)
    return int(_first_above(mass_W[None], uniform * mass_W[-1:])[0])


def _first_above(mass_SC: Floats, target_S: Floats) -> Ints64:
    """Return the first index [S] at which cumulative mass [S, C] exceeds the target [S].

    Rounding may make a target as large as the total mass; it is then lowered to just below it.
    """
    below_S = np.minimum(target_S, np.nextafter(mass_SC[:, -1], 0.0))
    indices: Ints64 = (mass_SC <= below_S[:, None]).sum(-1)
    return indices


def _wide(values: Tensor) -> Floats:
    """Convert [...] to a float64 array."""
    return values.numpy().astype(np.float64)
