"""Common parts of the GPU backends: their layers, the rows of a step as inputs of kernels, and decode steps.

R rows, T tokens, H query heads, K kv heads, E head size, V value size, L layers, N pages of the pool, S page size, P
pages of the longest row, X entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import (
    AttentionBackend,
    AttentionShape,
    DecodeBuffers,
    ForwardBatch,
    keys_and_values,
    split_heads,
)
from aioengine.attention._gpu_splits import COLUMNS, max_splits, plan_splits
from aioengine.kernels.arrays import Ints32
from aioengine.kernels.codes import FP8
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.attention import PagedRows
from aioengine.kernels.triton.decode import MAX_QUERIES, DecodeRows, decode
from aioengine.kernels.triton.pages import flatten_pages
from aioengine.kernels.triton.scores import ScoreRules


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """The layers of a backend.

    Attributes:
        pool: for each layer, keys [N, K, S, E] and values [N, K, S, V].
        rules: the ``ScoreRules`` of each layer.
    """

    shape: AttentionShape
    pool: list[tuple[Tensor, Tensor]]
    rules: list[ScoreRules]

    @property
    def page_size(self) -> int:
        return self.pool[0][0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries."""
        return self.shape.dtype or self.pool[0][0].dtype

    @property
    def is_quantized(self) -> bool:
        """Whether the pool has another dtype than queries."""
        return self.pool[0][0].dtype != self.dtype

    def target(self, slots: Tensor, layer: int) -> KVTarget:
        """Return the destination of a layer's keys and values at slots [T]."""
        return KVTarget(slots, *self.pool[layer], scales=self.rules[layer].scales)

    @property
    def device(self) -> torch.device:
        return self.pool[0][0].device

    def decode(
        self, q: Tensor, rows: DecodeRows, layer: int, *, out: Tensor, other: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Attend with q [T, H, E] to the pool of a layer into ``out`` [T, H, E]. other: see ``decode``."""
        scale, rules = self.shape.scale, self.rules[layer]
        decode(q, self.pool[layer], rows, scale=scale, out=out, other=other, rules=rules)


def attention_layers(shape: AttentionShape, kv_pool: Tensor) -> AttentionLayers:
    """Return the layers of the pool [L, 1 or 2, N, K, S, E]."""
    window, sinks = shape.common_window, shape.sinks or (None,) * shape.num_layers
    scales = shape.kv_scales if kv_pool.dtype == FP8 and shape.kv_scales else (None,) * shape.num_layers
    rules = [ScoreRules(window, shape.soft_cap, *tensors) for tensors in zip(sinks, scales, strict=True)]
    return AttentionLayers(shape, keys_and_values(kv_pool, shape), rules)


def pinned(column: Ints32) -> Tensor:
    """Copy the column [X] to pinned memory. A copy to the device from other memory would block the host."""
    return torch.from_numpy(column).pin_memory()


def uploaded(column: Ints32, device: torch.device) -> Tensor:
    """Copy the column [X] to the device without blocking the host."""
    return pinned(column).to(device, non_blocking=True)


def starts_of(lengths: Ints32) -> Tensor:
    """Return the start of each of R rows and the end of the last one: [R + 1] int32 on the host."""
    return pinned(np.concatenate(([0], lengths)).cumsum(dtype=np.int32))


def tiles_of(query_lengths: Ints32, size: int) -> Ints32:
    """Return [X, 2]: (row, first token within the row) of each tile of up to ``size`` tokens."""
    counts = -(-query_lengths // size)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((rows, (np.arange(len(rows)) - first) * size), axis=1).astype(np.int32)


def page_columns(kv_lengths: Ints32, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the start of each row's pages [R + 1], and the number of positions on its last page [R]; int32 on host."""
    num_pages = -(-kv_lengths // page_size)
    return starts_of(num_pages), pinned(kv_lengths - (num_pages - 1) * page_size)


def num_decode_rows(query_lengths: Ints32) -> int:
    """Return the number of rows of one token before the first longer row, for lengths [R]."""
    longer = np.flatnonzero(query_lengths > 1)
    return int(longer[0]) if longer.size else len(query_lengths)


def paged_rows(
    batch: ForwardBatch, query_lengths: Ints32, kv_lengths: Ints32, page_size: int
) -> tuple[PagedRows, Tensor]:
    """Return the rows of a step with lengths [R], and the start of each row's pages [R + 1] on the host."""
    page_starts, last_lengths = page_columns(kv_lengths, page_size)
    on_device, page_ids = flat_pages(batch.page_table, page_starts)
    query_starts, last_lengths = (
        column.to(page_ids.device, non_blocking=True) for column in (starts_of(query_lengths), last_lengths)
    )
    return PagedRows(query_starts, on_device, last_lengths, page_ids), page_starts


def flat_pages(page_table: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``starts`` [R + 1] and the concatenated page ids of [R, P], both on the device."""
    on_device = starts.to(page_table.device, non_blocking=True)
    indices = torch.empty(int(starts[-1]), dtype=torch.int32, device=page_table.device)
    flatten_pages(page_table, on_device, indices)
    return on_device, indices


def run_once(
    attention: AttentionBackend, layers: AttentionLayers, num_rows: int, count: int, num_cached: int = 0
) -> None:
    """Attend for rows of ``count`` tokens after ``num_cached`` positions, all on page 0, to compile the kernels."""
    shape, keys = layers.shape, layers.pool[0][0]
    num_pages, num_tokens = -(-(count + num_cached) // layers.page_size), num_rows * count
    batch = ForwardBatch(
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=keys.device),  # never written
        page_table=torch.zeros(num_rows, num_pages, dtype=torch.int32, device=keys.device),
        query_lengths=[count] * num_rows,
        kv_lengths=[count + num_cached] * num_rows,
    )
    attention.prepare(batch)
    heads = keys.new_zeros(num_tokens, shape.num_input_heads, shape.query_size, dtype=layers.dtype)
    attention.attend(*split_heads(heads, shape), 0)


def decode_rows(shape: AttentionShape, kv_lengths: Ints32, page_starts: Tensor, page_ids: Tensor) -> DecodeRows:
    """Prepare R rows of a step: kv_lengths [R] on the host, page_starts [R + 1] and page_ids on the device."""
    num_rows, device = len(kv_lengths), page_ids.device
    splits = plan_splits(kv_lengths, max_splits(num_rows, shape.num_kv_heads), shape.common_window)
    num_done = torch.zeros(num_rows * shape.num_kv_heads, dtype=torch.int32, device=device)  # see ``DecodeRows``
    return DecodeRows(page_starts, page_ids, uploaded(splits, device), num_done)


@dataclass(frozen=True, slots=True)
class PagedStep(ABC):
    """A prepared step, for kernels that read the lengths of the rows on the device. slots: [T], KV slots of tokens."""

    layers: AttentionLayers
    slots: Tensor
    rows: PagedRows

    @abstractmethod
    def attend(self, q: Tensor, layer: int, *, out: Tensor) -> None:
        """Attend with q [T, H, E] to the pool of a layer into ``out`` [T, H, V]."""


class PagedAttention:
    """Attention of a prepared step. Implements ``FixedDecode``, and a part of ``CapturableAttention``."""

    max_row_tokens = 1

    def __init__(self, layers: AttentionLayers, step: PagedStep | None = None) -> None:
        """step: None until ``prepare`` sets it."""
        self._layers = layers
        self._prepared = step

    @property
    def _step(self) -> PagedStep:
        assert self._prepared is not None, "prepare was not called"
        return self._prepared

    def plan(self, starts: Ints32, last_lengths: Ints32, tables: Ints32 | None = None) -> None:
        """Do nothing: the kernels read starts [R + 1] and last_lengths [R] on the device."""

    def target(self, layer: int) -> KVTarget:
        return self._layers.target(self._step.slots, layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E] -> [T, H * V]; k and v are read in the pool."""
        out = q.new_empty(*q.shape[:2], self._layers.shape.output_size)
        self._step.attend(q, layer, out=out)
        return out.flatten(1)

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E] -> out [T, H, V]; k and v are read in the pool."""
        return partial(self._step.attend, q, out=out)


class FixedDecodeRows:
    """Implements ``FixedDecode`` with our decode kernel."""

    def __init__(self, layers: AttentionLayers, num_rows: int, buffers: DecodeBuffers) -> None:
        self._layers = layers
        self._slots = buffers.slot_mapping
        shape, device = layers.shape, layers.device
        num_entries, num_columns = max_splits(num_rows, shape.num_kv_heads), COLUMNS
        max_tokens = MAX_QUERIES * shape.num_kv_heads // shape.num_heads if shape.common_window is None else 1
        self.max_row_tokens = max(min(buffers.max_row_tokens, max_tokens), 1)
        if self.max_row_tokens > 1:
            num_columns += 2
        self._rows = DecodeRows(
            buffers.starts,
            buffers.page_ids,
            torch.full((num_columns, num_entries), -1, dtype=torch.int32, device=device),
            torch.zeros(num_rows * shape.num_kv_heads, dtype=torch.int32, device=device),
            buffers.last_lengths if buffers.are_bounds or self.max_row_tokens > 1 else None,
            self.max_row_tokens,
        )
        # A draft model plans the steps of all drafts before the first of these plans is copied.
        shape_of_splits = 2 * buffers.max_row_tokens, num_columns, num_entries
        self._pinned_splits = [*torch.empty(shape_of_splits, dtype=torch.int32, pin_memory=True)]
        self._copied = [torch.cuda.Event() for _ in self._pinned_splits]
        self._number = 0

    def plan(self, starts: Ints32, last_lengths: Ints32, tables: Ints32 | None = None) -> None:
        """Plan a step, from host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R]."""
        if tables is not None:
            starts, last_lengths = starts[: len(tables)], last_lengths[tables[1:] - 1]
        lengths = (starts[1:] - starts[:-1] - 1) * self._layers.page_size + last_lengths
        shape = self._layers.shape
        num_used = max_splits(len(lengths), shape.num_kv_heads)  # more splits would only be merged
        splits = plan_splits(lengths, num_used, shape.common_window)
        self._number = (self._number + 1) % len(self._pinned_splits)
        pinned_plan, copied = self._pinned_splits[self._number], self._copied[self._number]
        copied.synchronize()  # do not overwrite an earlier plan while it is being copied
        plan, rows = pinned_plan.numpy(), splits[0]
        plan[:COLUMNS, :num_used], plan[:COLUMNS, num_used:] = splits, -1
        if tables is not None:  # the first row and the number of rows of each page table
            plan[COLUMNS:, :num_used] = tables[rows], np.diff(tables)[rows]
        elif self.max_row_tokens > 1:
            plan[COLUMNS], plan[COLUMNS + 1] = rows, 1
        self._rows.splits.copy_(pinned_plan, non_blocking=True)
        copied.record()

    def target(self, layer: int) -> KVTarget:
        return self._layers.target(self._slots, layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [R, H, E], k and v [R, K, E] -> [R, H * E]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._layers.decode(q, self._rows, layer, out=out)
        return out.view(q.shape[0], -1)
