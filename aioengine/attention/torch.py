"""Attention with plain torch operations: the reference for other backends, and the CPU backend if no other one works.

On a CPU, it is batch-invariant: the result of a token has the same bits alone, in any batch, in a decode step and in
any prefill chunk. Tokens are computed in blocks of ``BLOCK`` positions aligned from position 0, one block of one row at
a time. The shapes of the operations depend only on the block's position: tokens of the block that are not part of this
step are replaced by zeros.

T packed tokens, H query heads, K kv heads, G query heads per kv head, E head size, N pages of the pool, P pages of a
row, S page size, C positions that a block sees.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionShape, ForwardBatch
from aioengine.kernels.kv_target import WriteKV, from_stored, to_stored

BLOCK = 8


def _round_up(number: int) -> int:
    return -(-number // BLOCK) * BLOCK


class _StepRow(NamedTuple):
    """A row of the step.

    Attributes:
        first_token: index in T of its first token.
        start: position of this token.
        stop: position after its last token.
        pairs: [K, P] indices into the flattened (page, kv head) dimensions of the pool, for the pages of positions 0 to
            ``stop``, rounded up to whole blocks.
    """

    first_token: int
    start: int
    stop: int
    pairs: Tensor


def attend_block(
    q: Tensor,
    inside: slice,
    keys: Tensor,
    values: Tensor,
    *,
    is_hidden: Tensor | None,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with tokens of a block in fp32. The other tokens of the block are replaced by zeros.

    Args:
        q: [M, H, E].
        inside: the places of these tokens in the block.
        keys, values: fp32 [K, C, E] and [K, C, V].
        is_hidden: [BLOCK, C], the positions to which each token of the block does not attend; None: it attends to all.
        sinks: [H], see ``AttentionShape``.

    Returns:
        [M, H, V].
    """
    queries = q.new_zeros(BLOCK, *q.shape[1:], dtype=torch.float32)
    queries[inside] = q.float() * shape.scale
    grouped = queries.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # [K, G, BLOCK, E]
    scores = torch.bmm(grouped.flatten(1, 2), keys.transpose(1, 2)).view(*grouped.shape[:3], -1)
    if shape.soft_cap is not None:
        scores = scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
    if is_hidden is not None:
        scores = scores.masked_fill_(is_hidden, float("-inf"))
    if sinks is not None:
        sinks = sinks.float().view(*grouped.shape[:2], 1, 1).expand(-1, -1, BLOCK, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    attended = torch.bmm(weights.flatten(1, 2), values).view(*grouped.shape[:3], -1)
    return attended[:, :, inside].permute(2, 0, 1, 3).flatten(1, 2)


class TorchAttention:
    """Implements ``AttentionBackend`` for any page size. The pool must be initialized with zeros."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E]."""
        self._shape = shape
        self._pool = kv_pool
        self._num_kv_heads = shape.num_kv_heads
        self.page_size = kv_pool.shape[4]
        self._slots = torch.empty(0, dtype=torch.int64, device=kv_pool.device)
        self._rows: list[_StepRow] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._slots = batch.slot_mapping
        self._rows = []
        first_token = 0
        for table, count, stop in zip(batch.page_table, batch.query_lengths, batch.kv_lengths, strict=True):
            num_pages = -(-_round_up(stop) // self.page_size)
            # a block may extend beyond the row's pages: padding page 0 is used there, and masked
            pages = functional.pad(table[:num_pages], (0, max(0, num_pages - len(table))))
            pairs = pages * self._num_kv_heads + torch.arange(self._num_kv_heads, device=pages.device).unsqueeze(1)
            self._rows.append(_StepRow(first_token, stop - count, stop, pairs))
            first_token += count

    def target(self, layer: int) -> WriteKV:
        return partial(self._write, self._pool[layer], self._shape.scales(layer))

    def _write(self, pool: Tensor, scales: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, K, E] to their slots in the pool of a layer, [2, N, K, S, E]. scales: [2]."""
        key_scale, value_scale = (None, None) if scales is None else scales
        pages, offsets = self._slots // self.page_size, self._slots % self.page_size
        pool[0, pages, :, offsets] = to_stored(k, pool.dtype, key_scale)
        if self._shape.num_sides == 2:
            pool[1, pages, :, offsets] = to_stored(v, pool.dtype, value_scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        if not self._shape.expansions:
            return self._attended(q, layer).flatten(1)
        key_expansion, value_expansion = self._shape.expansions[layer].tensor_split((self._shape.plain_size,), dim=1)
        plain, rotated = q.tensor_split((self._shape.plain_size,), dim=2)
        absorbed = torch.cat((torch.einsum("thn,hnv->thv", plain, key_expansion), rotated), dim=2)
        return torch.einsum("thv,hov->tho", self._attended(absorbed, layer), value_expansion).flatten(1)

    def _attended(self, q: Tensor, layer: int) -> Tensor:
        """Attend with q [T, H, E] to the pool of a layer -> [T, H, E]; [T, H, V] with latent attention."""
        out = q.new_empty(*q.shape[:2], self._shape.stored_value_size)
        sinks, scales = self._shape.sinks[layer] if self._shape.sinks else None, self._shape.scales(layer)
        if scales is not None:
            scales = scales.view(2, 1, 1, 1)
        for row in self._rows:
            stored = self._pool[layer].flatten(1, 2)[:, row.pairs].flatten(2, 3)
            sides = from_stored(stored, torch.float32, scales)  # [1 or 2, K, P * S, E]
            keys, values = sides[0], sides[-1][..., : self._shape.stored_value_size]
            window = self._shape.window(layer, row.stop)
            for begin in range(row.start // BLOCK * BLOCK, row.stop, BLOCK):
                first = 0 if window is None else max(begin - window + 1, 0) // BLOCK * BLOCK
                visible = slice(first, begin + BLOCK)
                tokens = torch.arange(begin, begin + BLOCK, device=q.device).unsqueeze(1)
                positions = torch.arange(first, begin + BLOCK, device=q.device)
                is_hidden = positions > tokens
                if window is not None:
                    is_hidden |= positions <= tokens - window
                low, high = max(begin, row.start), min(begin + BLOCK, row.stop)
                own = slice(row.first_token + low - row.start, row.first_token + high - row.start)
                inside, kv = slice(low - begin, high - begin), (keys[:, visible], values[:, visible])
                out[own] = attend_block(q[own], inside, *kv, is_hidden=is_hidden, shape=self._shape, sinks=sinks)
        return out


PLUGIN = TorchAttention
