"""Attention on a GPU with Triton kernels, for any head size and dtype, without a C++ compiler.

It is batch-invariant (see ``kernels/triton/attention.py``). FlashInfer is faster, but not batch-invariant.

Latent attention is batch-invariant if the shape requires it. Otherwise, if the shape has ``expansions``, the backend is
``AdaptiveLatentAttention``.

T packed tokens, R rows, H query heads, K kv heads, E head size, V value size, N pages of the pool, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import keys_and_values
from aioengine.attention._gpu_rows import PagedAttention, layer_rules, paged_rows, pinned, run_once, tiles_of
from aioengine.attention._latent import AdaptiveLatentAttention
from aioengine.kernels.triton import attention as kernels
from aioengine.kernels.triton.attention import EVEN_SPLITS, PagedRows, SplitPlan, head_group, num_splits

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch
    from aioengine.kernels.triton.attention import HeadGroup
    from aioengine.kernels.triton.scores import ScoreRules

ENOUGH_PROGRAMS = 256
"""Number of programs that keeps a GPU busy. With fewer (row, kv head) pairs, several programs compute each pair."""
LONG_ROW_PROGRAMS = 8
"""Minimum programs per pair if rows may be long: one long row among short rows would finish much later than they do."""
MANY_PROGRAMS = 1024
"""With this number of pairs or more, long rows have one program too: merging splits would cost short rows a tenth of
the attention time on an H200.
"""
MAX_SPLITS_BYTES = 256 << 20
"""Limit of the results of splits before they are merged."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Data shared by all steps.

    Attributes:
        pool: for each layer, keys [N, K, S, E] and values [N, K, S, V].
        rules: for each layer.
    """

    shape: AttentionShape
    pool: list[tuple[Tensor, Tensor]]
    rules: list[ScoreRules]

    @property
    def group(self) -> HeadGroup:
        return head_group(self.shape.num_heads, self.pool[0])

    def num_programs(self, num_rows: int, max_splits: int) -> int:
        """Return the number of programs for the splits of a decode row and kv head; 1: one after the other."""
        pairs = num_rows * -(-self.shape.num_heads // self.group.heads)
        num_bytes = 4 * num_rows * max_splits * self.shape.num_heads * (self.shape.output_size + 2)
        is_long = max_splits > EVEN_SPLITS.value and pairs < MANY_PROGRAMS
        wanted = max(-(-ENOUGH_PROGRAMS // pairs), LONG_ROW_PROGRAMS if is_long else 1)
        if wanted == 1 or num_bytes > MAX_SPLITS_BYTES:
            return 1
        return max(min(max_splits, wanted), 2)  # at least 2: 1 selects other kernels


@dataclass(frozen=True, slots=True)
class _TritonStep:
    """Implements ``PagedStep``.

    Attributes:
        tiles: [X, 2] int32, as in ``kernels.triton.attention.attend``.
        max_splits: number of splits of the longest row.
        num_programs: ``_Shared.num_programs`` if each row has one token, else 1. 1 selects the kernel over ``tiles``.
    """

    shared: _Shared
    slots: Tensor
    rows: PagedRows
    tiles: Tensor
    max_splits: int
    num_programs: int

    def attend(self, q: Tensor, layer: int, *, out: Tensor) -> None:
        """Attend with q [T, H, E] to the pool of a layer -> out [T, H, V]."""
        shape, pool, rules = self.shared.shape, self.shared.pool[layer], self.shared.rules[layer]
        if self.num_programs == 1:
            in_splits = shape.batch_invariant or shape.value_size is None
            kernels.attend(q, pool, self.rows, self.tiles, scale=shape.scale, out=out, rules=rules, in_splits=in_splits)
        else:
            splits = SplitPlan(self.max_splits, self.num_programs)
            kernels.attend_splits(q, pool, self.rows, splits, scale=shape.scale, out=out, rules=rules)


class TritonAttention(PagedAttention):
    """Implements ``CapturableAttention``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 1 or 2, N, K, S, E]."""
        super().__init__(shape, keys_and_values(kv_pool, shape))
        self._shared = _Shared(shape, self._pool, layer_rules(shape))

    def prepare(self, batch: ForwardBatch) -> None:
        shared = self._shared
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        rows, _ = paged_rows(batch, query_lengths, kv_lengths, self._page_size)
        max_splits = num_splits(int(kv_lengths.max()))
        is_decode = int(query_lengths.max()) == 1
        num_programs = shared.num_programs(len(kv_lengths), max_splits) if is_decode else 1
        tiles = pinned(tiles_of(query_lengths, shared.group.tokens)).to(self._device, non_blocking=True)
        self._step = _TritonStep(shared, batch.slot_mapping, rows, tiles, max_splits, num_programs)

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> PagedAttention:
        """Return attention for decode steps of ``num_rows`` rows."""
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=self._device)
        tiles = torch.stack((numbers[:-1], torch.zeros_like(numbers[:-1])), dim=1)
        rows = PagedRows(numbers, buffers.starts, buffers.last_lengths, buffers.page_ids)
        max_splits = num_splits(buffers.max_pages * self._page_size)
        num_programs = self._shared.num_programs(num_rows, max_splits)
        step = _TritonStep(self._shared, buffers.slot_mapping, rows, tiles, max_splits, num_programs)
        return PagedAttention(self._shape, self._pool, step)

    def warm_up(self) -> None:
        """Compile the kernels of steps without a CUDA graph: prefill chunks and decode rows."""
        for count in (1, 2):
            run_once(self, self._shape, self._pool[0][0], 1, count)


def build(shape: AttentionShape, kv_pool: Tensor) -> TritonAttention | AdaptiveLatentAttention:
    """Return the backend for this model. kv_pool: [L, 1 or 2, N, K, S, E]."""
    return AdaptiveLatentAttention(shape, kv_pool) if shape.expansions else TritonAttention(shape, kv_pool)


PLUGIN = build
