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
from aioengine.attention._gpu_rows import (
    flat_pages,
    layer_rules,
    page_columns,
    pinned,
    plan_page_0,
    run_once,
    starts_of,
    tiles_of,
)
from aioengine.attention._latent import AdaptiveLatentAttention
from aioengine.kernels.rotate_and_write import KVTarget
from aioengine.kernels.triton import attention as attention_kernels
from aioengine.kernels.triton.attention import EVEN_SPLITS, PagedRows, SplitPlan, head_group, num_splits

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch
    from aioengine.kernels.triton.scores import ScoreRules

    Ints = npt.NDArray[np.int32]

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
    def tiles_of_token(self) -> int:
        """Number of tiles among which the query heads of a token are divided."""
        return -(-self.shape.num_heads // head_group(self.shape.num_heads, self.pool[0]).heads)

    @property
    def tokens_of_tile(self) -> int:
        return head_group(self.shape.num_heads, self.pool[0]).tokens

    @property
    def page_size(self) -> int:
        return self.pool[0][0].shape[2]

    def num_programs(self, num_rows: int, max_splits: int) -> int:
        """Return the number of programs for the splits of a decode row and kv head; 1: one after the other."""
        pairs = num_rows * self.tiles_of_token
        num_bytes = 4 * num_rows * max_splits * self.shape.num_heads * (self.shape.output_size + 2)
        is_long = max_splits > EVEN_SPLITS.value and pairs < MANY_PROGRAMS
        wanted = max(-(-ENOUGH_PROGRAMS // pairs), LONG_ROW_PROGRAMS if is_long else 1)
        if wanted == 1 or num_bytes > MAX_SPLITS_BYTES:
            return 1
        return max(min(max_splits, wanted), 2)  # at least 2: 1 selects other kernels


@dataclass(frozen=True, slots=True)
class _TritonStep:
    """A prepared step.

    Attributes:
        slot_mapping: [T] KV slots of the step's tokens.
        tiles: [X, 2] int32, as in ``kernels.triton.attention.attend``.
        max_splits: number of splits of the longest row.
        num_programs: ``_Shared.num_programs`` if each row has one token, else 1. 1 selects the kernel over ``tiles``.
    """

    slot_mapping: Tensor
    rows: PagedRows
    tiles: Tensor
    max_splits: int
    num_programs: int


def _attend_into(shared: _Shared, step: _TritonStep, q: Tensor, layer: int, *, out: Tensor) -> None:
    """Attend with q [T, H, E] to the pool of a layer -> out [T, H, V]."""
    pool, rows, scale = shared.pool[layer], step.rows, shared.shape.scale
    rules = shared.rules[layer]
    if step.num_programs == 1:
        in_splits = shared.shape.batch_invariant or shared.shape.value_size is None
        attention_kernels.attend(q, pool, rows, step.tiles, scale=scale, out=out, rules=rules, in_splits=in_splits)
    else:
        splits = SplitPlan(step.max_splits, step.num_programs)
        attention_kernels.attend_splits(q, pool, rows, splits, scale=scale, out=out, rules=rules)


def _attended(shared: _Shared, step: _TritonStep, q: Tensor, layer: int) -> Tensor:
    """Attend with q [T, H, E] to the pool of a layer -> [T, H * V]."""
    out = torch.empty(*q.shape[:2], shared.shape.output_size, dtype=q.dtype, device=q.device)
    _attend_into(shared, step, q, layer, out=out)
    return out.view(q.shape[0], -1)


class TritonAttention:
    """Implements ``CapturableAttention``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 1 or 2, N, K, S, E]."""
        self._shared = _Shared(shape, keys_and_values(kv_pool, shape), layer_rules(shape))
        self._device = kv_pool.device
        self._step: _TritonStep | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        shared = self._shared
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        page_starts, last_lengths = page_columns(kv_lengths, shared.page_size)
        on_device, page_ids = flat_pages(batch.page_table, page_starts)
        rows = PagedRows(self._upload(starts_of(query_lengths)), on_device, self._upload(last_lengths), page_ids)
        max_splits = num_splits(int(kv_lengths.max()))
        is_decode = int(query_lengths.max()) == 1
        num_programs = shared.num_programs(len(kv_lengths), max_splits) if is_decode else 1
        tiles = self._upload(pinned(tiles_of(query_lengths, shared.tokens_of_tile)))
        self._step = _TritonStep(batch.slot_mapping, rows, tiles, max_splits, num_programs)

    def target(self, layer: int) -> KVTarget:
        assert self._step is not None, "prepare was not called"
        return KVTarget(self._step.slot_mapping, *self._shared.pool[layer])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k [T, K, E], v [T, K, V] -> [T, H * V]."""
        assert self._step is not None, "prepare was not called"
        return _attended(self._shared, self._step, q, layer)

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k [T, K, E], v [T, K, V] -> out [T, H, V]."""
        assert self._step is not None, "prepare was not called"
        _attend_into(self._shared, self._step, q, layer, out=out)

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedTritonDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        return FixedTritonDecode(self._shared, num_rows, buffers)

    def warm_up(self) -> None:
        """Compile the kernels of steps without a CUDA graph: prefill chunks and decode rows."""
        run_once(self, self._shared.shape, self._shared.pool[0][0])

    def _upload(self, column: Tensor) -> Tensor:
        """Copy a pinned column [X] to the device."""
        return column.to(self._device, non_blocking=True)


class FixedTritonDecode:
    """Implements ``FixedDecode`` without plans: the kernels read the lengths on the device."""

    def __init__(self, shared: _Shared, num_rows: int, buffers: DecodeBuffers) -> None:
        device = buffers.starts.device
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        tiles = torch.stack((numbers[:-1], torch.zeros_like(numbers[:-1])), dim=1)
        rows = PagedRows(numbers, buffers.starts, buffers.last_lengths, buffers.page_ids)
        max_splits = num_splits(buffers.max_pages * shared.page_size)
        self._shared = shared
        num_programs = shared.num_programs(num_rows, max_splits)
        self._step = _TritonStep(buffers.slot_mapping, rows, tiles, max_splits, num_programs)

    def plan_first(self, kv_lengths: Ints) -> None:
        """Fill the buffers for rows of ``kv_lengths`` [R] positions, all on page 0."""
        plan_page_0(self._step.rows, kv_lengths, self._shared.page_size)

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Do nothing: the kernels read starts [R + 1] and last_lengths [R] on the device."""

    def target(self, layer: int) -> KVTarget:
        return KVTarget(self._step.slot_mapping, *self._shared.pool[layer])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [R, H, E], k [R, K, E], v [R, K, V] -> [R, H * V]."""
        return _attended(self._shared, self._step, q, layer)


def build(shape: AttentionShape, kv_pool: Tensor) -> TritonAttention | AdaptiveLatentAttention:
    """Return the backend for this model. kv_pool: [L, 1 or 2, N, K, S, E]."""
    return AdaptiveLatentAttention(shape, kv_pool) if shape.expansions else TritonAttention(shape, kv_pool)


PLUGIN = build
