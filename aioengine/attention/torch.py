"""Attention with plain torch operations: the reference for all other backends, and the backend of a CPU where none of
them works or keys and values have another dtype than queries.

A token's result is the same bits whatever it is computed with: alone or in any batch, as a decode step or inside any
prefill chunk. Tokens are computed in blocks of ``BLOCK`` positions aligned from position 0, a block of one row at a
time. The shapes of a block's operations depend on its position alone, because tokens of the block that this step does
not compute are zeros in it.

Shape letters: T packed tokens, H query heads, K kv heads, G query heads of a kv head, E head size, N pages of the
pool, P pages of a row, S page size, C positions that a block sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, ForwardBatch, WriteKV

BLOCK = 8


def _round_up(number: int) -> int:
    return -(-number // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the step.

    Attributes:
        first_token: index in T of its first token.
        start: position of that token in its request.
        stop: the position after its last token.
        pairs: [K, P] indices into the flattened dimensions (page, kv head) of the pool: the pages of positions 0 to
            ``stop``, rounded up to whole blocks.
    """

    first_token: int
    start: int
    stop: int
    pairs: Tensor


class _Seen(NamedTuple):
    """Keys and values [K, C, E] of C positions from ``first`` on."""

    first: int
    keys: Tensor
    values: Tensor


class TorchAttention:
    """Implements ``AttentionBackend``. ``kv_pool``: of ``kv_pool_shape``, zeros at first, of any page size."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E]."""
        self._shape = shape
        self._pool = kv_pool
        self._num_kv_heads = shape.num_kv_heads
        self.page_size = kv_pool.shape[4]
        self._slots = torch.empty(0, dtype=torch.int64, device=kv_pool.device)
        self._rows: list[_Row] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._slots = batch.slot_mapping
        self._rows = []
        first_token = 0
        for table, count, stop in zip(batch.page_table, batch.query_lengths, batch.kv_lengths, strict=True):
            num_pages = -(-_round_up(stop) // self.page_size)
            # a block may reach past the row's own pages: the padding page 0 stands there, and is masked
            pages = functional.pad(table[:num_pages], (0, max(0, num_pages - len(table))))
            pairs = pages * self._num_kv_heads + torch.arange(self._num_kv_heads, device=pages.device).unsqueeze(1)
            self._rows.append(_Row(first_token, stop - count, stop, pairs))
            first_token += count

    def target(self, layer: int) -> WriteKV:
        return partial(self._write, self._pool[layer])

    def _write(self, pool: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, K, E] to their slots in the pool of a layer, [2, N, K, S, E]."""
        pages, offsets = self._slots // self.page_size, self._slots % self.page_size
        pool[0, pages, :, offsets] = k.to(pool.dtype)
        if self._shape.num_sides == 2:
            pool[1, pages, :, offsets] = v.to(pool.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        if not self._shape.expansions:
            return self._attended(q, layer).flatten(1)
        for_keys, for_values = self._shape.expansions[layer].tensor_split((self._shape.plain_size,), dim=1)
        plain, rotated = q.tensor_split((self._shape.plain_size,), dim=2)
        absorbed = torch.cat((torch.einsum("thn,hnv->thv", plain, for_keys), rotated), dim=2)
        return torch.einsum("thv,hov->tho", self._attended(absorbed, layer), for_values).flatten(1)

    def _attended(self, q: Tensor, layer: int) -> Tensor:
        """q [T, H, E] over the pool of a layer -> [T, H, E]; [T, H, V] with latent attention."""
        out = q.new_empty(*q.shape[:2], self._shape.kept_value_size)
        for row in self._rows:
            sides = self._pool[layer].flatten(1, 2)[:, row.pairs].flatten(2, 3).float()  # [1 or 2, K, P * S, E]
            keys, values = sides[0], sides[-1][..., : self._shape.kept_value_size]
            window = self._shape.window(layer, row.stop)
            for begin in range(row.start // BLOCK * BLOCK, row.stop, BLOCK):
                first = 0 if window is None else max(begin - window + 1, 0) // BLOCK * BLOCK
                seen = _Seen(first, keys[:, first : begin + BLOCK], values[:, first : begin + BLOCK])
                self._attend_block(row, begin, q, layer, seen=seen, out=out)
        return out

    def _attend_block(self, row: _Row, begin: int, q: Tensor, layer: int, *, seen: _Seen, out: Tensor) -> None:
        """The tokens of a row at positions from ``begin`` on: q [T, H, E] to out."""
        num_kv_heads, num_seen, head_size = seen.keys.shape
        first, last = max(begin, row.start), min(begin + BLOCK, row.stop)
        inside = slice(first - begin, last - begin)
        tokens = slice(row.first_token + first - row.start, row.first_token + last - row.start)
        queries = q.new_zeros(num_kv_heads, q.shape[1] // num_kv_heads, BLOCK, head_size, dtype=torch.float32)
        grouped = q[tokens].unflatten(1, queries.shape[:2]).permute(1, 2, 0, 3)
        queries[:, :, inside] = grouped.float() * self._shape.scale
        scores = torch.bmm(queries.flatten(1, 2), seen.keys.transpose(1, 2)).view(*queries.shape[:3], num_seen)
        weights = self._softmax(scores, begin, seen.first, layer)
        attended = torch.bmm(weights.flatten(1, 2), seen.values).view(*queries.shape[:3], -1)
        out[tokens] = attended[:, :, inside].permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)

    def _softmax(self, scores: Tensor, begin: int, first: int, layer: int) -> Tensor:
        """Scores [K, G, BLOCK, C] of tokens from ``begin`` on, and of positions from ``first`` on -> weights."""
        shape, (num_kv_heads, group, num_tokens, num_seen) = self._shape, scores.shape
        if shape.soft_cap is not None:
            scores = scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
        tokens = torch.arange(begin, begin + num_tokens, device=scores.device).unsqueeze(1)
        positions = torch.arange(first, first + num_seen, device=scores.device)
        hidden = positions > tokens
        window = shape.window(layer, begin + num_tokens)
        if window is not None:
            hidden |= positions <= tokens - window
        scores = scores.masked_fill_(hidden, float("-inf"))
        if not shape.sinks:
            return torch.softmax(scores, -1)
        sinks = shape.sinks[layer].float().view(num_kv_heads, group, 1, 1).expand(-1, -1, num_tokens, 1)
        return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :num_seen]


PLUGIN = TorchAttention
