"""top-k, then top-p, then min-p, then the draw: which tokens of a row of probabilities may come, and which one does.

Everything is a function of one row alone, so a request draws the same token in any batch. The rules, for a row of fp32
probabilities p in vocabulary order, with ties broken by vocabulary order:

- top-k keeps the k largest; top-p keeps, of these, a token when the mass of those before it is less than
  ``top_p`` of their mass; min-p keeps, of these, what has at least ``min_p`` times the largest probability;
- the draw is the inverse of the cumulative distribution over what is kept, in vocabulary order: the first token at
  which the cumulated mass exceeds ``uniform`` times the whole.

Sorting a vocabulary would cost milliseconds a row. The largest probabilities are found through the maxima of
interleaved blocks instead: whatever is larger than the largest maximum of the blocks that were left out stands in the
blocks that were taken. Rows for which these are not enough (flat distributions) go through an exact histogram.

Shape letters: S rows, W width of a row (a multiple of BLOCK), B blocks, C candidates, H head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float64]

BLOCK = 64
"""Widths of rows are multiples of this."""

TOP_K_OFF = 1 << 30

_NUM_BLOCKS = 128  # blocks whose tokens become candidates
_HEAD = 256  # largest candidates that are put in order


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rules of S rows, as columns. ``top_k`` [S] int64 (TOP_K_OFF: all), the others [S] float64."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def mass_limits(self) -> Tensor:
        """The share of the mass that top-p keeps; infinite where it is off, so that rounding drops nothing."""
        return torch.where(self.top_p < 1.0, self.top_p, torch.inf)


def draw(p_SW: Tensor, uniform_S: Tensor) -> Tensor:
    """One token id a row, [S] int64, by the cumulated mass in vocabulary order. ``uniform_S`` is float64 in [0, 1).

    The mass is cumulated in two levels, by blocks (summed in fp32) and inside the block that is hit.
    """
    blocks_SBC = torch.unflatten(p_SW, -1, (-1, BLOCK))
    mass_SB = blocks_SBC.sum(-1).to(torch.float64).cumsum(-1)
    target_S = _below(uniform_S * mass_SB[:, -1], mass_SB[:, -1])
    block_S = _first_above(mass_SB, target_S)
    before_S = torch.nn.functional.pad(mass_SB, (1, 0)).gather(-1, block_S[:, None])[:, 0]
    index_SC = block_S[:, None, None].expand(-1, 1, BLOCK)
    inside_SC = blocks_SBC.gather(1, index_SC)[:, 0].to(torch.float64).cumsum(-1)
    token_S = _first_above(inside_SC, _below(target_S - before_S, inside_SC[:, -1]))
    return block_S * BLOCK + token_S


def draw_truncated(p_SW: Tensor, uniform_S: Tensor, rules: Truncation) -> Tensor:
    """One token id a row, [S] int64, of what top-k, top-p and min-p leave."""
    candidates_SC, ids_SC, left_out_S = _candidates(p_SW)
    keep_SC, is_sure_S = _keep(candidates_SC, left_out_S, rules, p_SW.shape[-1])
    mass_SC = torch.where(keep_SC, candidates_SC, 0.0).to(torch.float64).cumsum(-1)
    place_S = _first_above(mass_SC, _below(uniform_S * mass_SC[:, -1], mass_SC[:, -1]))
    token_S = place_S if ids_SC is None else ids_SC.gather(-1, place_S[:, None])[:, 0]
    for i in (~is_sure_S).nonzero()[:, 0].tolist():
        p_W = p_SW[i].cpu().numpy()
        keep_W = kept(p_W, top_k=int(rules.top_k[i]), top_p=float(rules.top_p[i]), min_p=float(rules.min_p[i]))
        token_S[i] = _draw_kept(p_W, keep_W, float(uniform_S[i]))
    return token_S


def _candidates(p_SW: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens that may be kept: probabilities [S, C] in vocabulary order, their ids (None: all), largest left out."""
    num_rows, width = p_SW.shape
    num_blocks = width // BLOCK
    if num_blocks <= _NUM_BLOCKS:
        return p_SW, None, p_SW.new_zeros(num_rows)
    # Block b holds the tokens b, b + B, b + 2 B, ...: so the maxima are taken along contiguous memory, and members of
    # the taken blocks, read place by place, are in vocabulary order.
    grid_SxB = torch.unflatten(p_SW, -1, (BLOCK, num_blocks))
    best = grid_SxB.amax(1).topk(_NUM_BLOCKS + 1)
    taken = best.indices[:, :_NUM_BLOCKS].sort(-1).values
    candidates = grid_SxB.gather(2, taken[:, None, :].expand(-1, BLOCK, -1)).flatten(1)
    offsets = torch.arange(0, width, num_blocks, device=p_SW.device)
    ids = (offsets[None, :, None] + taken[:, None, :]).flatten(1)
    return candidates, ids, best.values[:, -1]


def _keep(candidates_SC: Tensor, left_out_S: Tensor, rules: Truncation, width: int) -> tuple[Tensor, Tensor]:
    """Which candidates stay, [S, C] bool, and in which rows that is certain, [S] bool."""
    head_SH = candidates_SC.topk(min(_HEAD, candidates_SC.shape[-1])).values
    size = head_SH.shape[-1]
    wide_SH = head_SH.to(torch.float64)
    mass_SH = wide_SH.cumsum(-1)
    is_short_S = rules.top_k <= size  # the whole top-k set is in the head, and so is its mass
    last_S = rules.top_k.clamp(max=size)[:, None] - 1
    whole_S = torch.where(is_short_S, mass_SH.gather(-1, last_S)[:, 0], 1.0)
    before_SH = mass_SH - wide_SH
    rank_H = torch.arange(size, device=head_SH.device)
    stays_SH = (before_SH < (rules.mass_limits * whole_S)[:, None]) & (rank_H < rules.top_k[:, None])
    stays_SH &= wide_SH >= (rules.min_p * wide_SH[:, 0])[:, None]
    stays_SH[:, 0] = True
    num_S = stays_SH.sum(-1)
    border_S = head_SH.gather(-1, num_S[:, None] - 1)  # [S, 1], the smallest probability that stays
    num_ties_S = num_S - (head_SH > border_S).sum(-1)
    ties_SC = candidates_SC == border_S
    keep_SC = (candidates_SC > border_S) | (ties_SC & (ties_SC.cumsum(-1) <= num_ties_S[:, None]))
    has_mass_S = is_short_S | (rules.top_k >= width) | (rules.top_p >= 1.0)
    is_whole_S = is_short_S | (num_S < size)
    is_apart_S = (border_S[:, 0] > left_out_S) | (left_out_S == 0)
    return keep_SC, has_mass_S & is_whole_S & is_apart_S


def kept(p_W: npt.NDArray[np.float32], *, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens of one row stay, exactly, whatever the distribution looks like."""
    keep_W = np.ones(len(p_W), dtype=np.bool_)
    whole = 1.0
    if top_k < len(p_W):
        keep_W = _head(p_W, np.ones(len(p_W)), float(top_k))
        p_W = np.where(keep_W, p_W, np.float32(0))
        whole = float(p_W.sum(dtype=np.float64))
    if top_p < 1.0:
        keep_W &= _head(p_W, p_W.astype(np.float64), top_p * whole)
    keep_W &= p_W >= min_p * float(p_W.max())
    keep_W[p_W.argmax()] = True
    return keep_W


def _head(p_W: npt.NDArray[np.float32], weights_W: Floats, limit: float) -> npt.NDArray[np.bool_]:
    """Largest first, keep a token while the weight of those before it is less than ``limit``.

    Only the bin of the histogram in which the limit is reached has to be sorted. The upper half of the bits of a
    probability is its bin: larger bits, larger probability.
    """
    bins_W = p_W.view(np.int32) >> 16
    weight_of_bin = np.bincount(bins_W, weights_W)
    above = weight_of_bin[::-1].cumsum()[::-1] - weight_of_bin
    border = int(np.flatnonzero(above < limit)[0])
    inside = np.flatnonzero(bins_W == border)
    inside = inside[np.argsort(-p_W[inside], kind="stable")]
    before = above[border] + np.cumsum(weights_W[inside]) - weights_W[inside]
    keep_W = bins_W > border
    keep_W[inside[before < limit]] = True
    return keep_W


def _draw_kept(p_W: npt.NDArray[np.float32], keep_W: npt.NDArray[np.bool_], uniform: float) -> int:
    mass_W = np.where(keep_W, p_W, np.float32(0)).cumsum(dtype=np.float64)
    target = min(uniform * mass_W[-1], np.nextafter(mass_W[-1], 0.0))
    return int(np.searchsorted(mass_W, target, side="right"))


def _below(target_S: Tensor, whole_S: Tensor) -> Tensor:
    """``target_S``, but less than ``whole_S`` also after rounding: the draw must end inside."""
    return target_S.minimum(torch.nextafter(whole_S, torch.zeros_like(whole_S)))


def _first_above(mass_SC: Tensor, target_S: Tensor) -> Tensor:
    """The first place of each row at which the cumulated mass exceeds the target, [S] int64."""
    return torch.searchsorted(mass_SC, target_S[:, None], right=True)[:, 0]
