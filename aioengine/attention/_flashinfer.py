"""FlashInfer's prefill kernels: for rows of several tokens, and for cascade attention of decode rows.

Rows whose keys and values are all computed in this step ("fresh" rows) read them from the tensors of the step. This is
20% faster than reading pages. Other rows read pages. If the pool has another dtype than queries, rows read converted
copies of its keys and values, or pages with our Triton kernels (``ConvertedRows``). Until the kernels are compiled,
``TritonAttention`` computes these rows through the same methods, ``prepare`` and ``bind``.

In cascade attention, decode rows with the same first pages attend to these pages in one non-causal prefill. The decode
kernel attends to the other pages, and merges both results. Prefill rows with the same first pages do this too, but the
keys and values of the shared pages are copied first. To merge results, FlashInfer returns the log-sum-exp of the scores
(``log_sums``, in base 2).

T packed tokens, R rows, H query heads, K kv heads, E head size, N pages of the pool, S page size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from aioengine.attention._base import AttentionShape, CascadeLimits, DecodeBuffers, ForwardBatch, SharedPages
from aioengine.attention._gpu_rows import (
    AttentionLayers,
    FixedDecodeRows,
    attention_layers,
    flat_pages,
    page_columns,
    pinned,
    starts_of,
    uploaded,
)
from aioengine.attention._shared_rows import find_shared
from aioengine.attention.triton import TritonAttention
from aioengine.kernels.arrays import Ints32
from aioengine.kernels.triton.pages import convert
from aioengine.kernels.triton.scores import add_sinks, merge

WORKSPACE_BYTES = 512 << 20
_workspaces: WeakValueDictionary[torch.device, Tensor] = WeakValueDictionary()
"""One workspace per device, shared by all backends: kernels of a stream run one after the other."""
PLAN_BYTES = 1 << 20
"""Size of a plan of few rows and tokens, on the device and on the host."""
MIN_FRESH_TOKENS = 256
"""With fewer tokens, a separate plan costs more than it saves."""
MAX_COPY_BYTES = 128 << 20
"""Limit of converted copies of keys and values."""
MAX_GROUPS = 8
MIN_ROWS = 48
"""Limits of cascade attention in decode steps, see ``CascadeLimits``."""
MIN_SAVED_BYTES = 256 << 20
"""A group of rows must save reading at least this many bytes of keys and values per layer. On an H200, 64 rows of an 8B
model that share 1024 tokens take equally long with and without cascade.
"""


def workspace_on(device: torch.device) -> Tensor | None:
    """Return the workspace [bytes] of all backends on a device; None: there is no backend."""
    return _workspaces.get(device)


@dataclass(frozen=True, slots=True)
class FlashInferLayers(AttentionLayers):
    """The layers of a FlashInfer backend, and the state shared by all its plans.

    Attributes:
        copied: recorded when the copy of a plan to the device is queued. FlashInfer writes plans to pinned memory, so
            the host must wait for this event before it writes the next plan.
    """

    workspace: Tensor
    copied: torch.cuda.Event

    @classmethod
    def of(cls, shape: AttentionShape, kv_pool: Tensor) -> FlashInferLayers:
        """kv_pool: [L, 2, N, K, S, E]."""
        device = kv_pool.device
        workspace = _workspaces.get(device)
        if workspace is None:
            workspace = _workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        layers = attention_layers(shape, kv_pool)
        return cls(shape, layers.pool, layers.rules, workspace, torch.cuda.Event())

    def heads(self) -> tuple[int, int, int]:
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_size

    @property
    def plan_options(self) -> dict[str, object]:
        """The common arguments of all ``plan`` calls of FlashInfer."""
        return {
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "sm_scale": self.shape.scale,
            "logits_soft_cap": self.shape.soft_cap,
        }

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of a position in the dtype of queries."""
        return 2 * self.shape.num_kv_heads * self.shape.head_size * self.dtype.itemsize

    @property
    def window_left(self) -> int:
        """Number of earlier positions that a token attends to; -1: all."""
        window = self.shape.common_window
        return -1 if window is None else window - 1

    @property
    def cascade_limits(self) -> CascadeLimits:
        return CascadeLimits(MIN_ROWS, MIN_SAVED_BYTES // (self.page_size * self.position_bytes), MAX_GROUPS)


def _run(
    wrapper: BatchPrefillWithPagedKVCacheWrapper | BatchPrefillWithRaggedKVCacheWrapper,
    *inputs: object,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    """Run attention, write the result to ``out`` [T, H, E], and apply the sinks [H] if there are any."""
    if sinks is None:
        wrapper.run(*inputs, out=out)
    else:
        _, log_sums = wrapper.run(*inputs, out=out, return_lse=True)
        add_sinks(out, log_sums, sinks)


class PrefillRows:
    """Attention of the prefill rows of a step: first the rows that read pages, then the fresh rows.

    Adjacent rows of the first kind may have the same first pages. These are computed separately for all of them.
    """

    def __init__(self, layers: FlashInferLayers) -> None:
        self._layers = layers
        self._paged = BatchPrefillWithPagedKVCacheWrapper(layers.workspace, "HND")
        self._ragged = BatchPrefillWithRaggedKVCacheWrapper(layers.workspace, "NHD")
        self._prefix = BatchPrefillWithRaggedKVCacheWrapper(layers.workspace, "NHD")
        self._num_paged = 0
        self._has_fresh = False
        self._shared: tuple[slice, Tensor] | None = None
        """The tokens that share pages, and the indices of these pages' (page, kv head, offset) triples in the pool."""

    def prepare(self, batch: ForwardBatch) -> None:
        page_table, host_pages = batch.page_table, batch.host_pages
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        num_rows = len(query_lengths)
        continued = np.flatnonzero(kv_lengths > query_lengths)
        num_paged = int(continued[-1]) + 1 if continued.size else 0
        self._has_fresh = int(query_lengths[num_paged:].sum()) >= MIN_FRESH_TOKENS
        if not self._has_fresh:
            num_paged = num_rows
        self._num_paged = int(query_lengths[:num_paged].sum())
        self._shared = None
        layers = self._layers
        layers.copied.synchronize()
        if num_paged:
            pages, lengths, queries = page_table[:num_paged], kv_lengths[:num_paged], query_lengths[:num_paged]
            if host_pages is not None and layers.shape.common_window is None and not layers.shape.sinks:
                rows = find_shared(host_pages[:num_paged], queries, lengths, layers.page_size)
                if rows is not None:
                    first, end, num_pages = rows
                    tokens = slice(int(queries[:first].sum()), int(queries[:end].sum()))
                    self._plan_shared(host_pages[first, :num_pages], tokens)
                    rest = pages[first:end, num_pages:]
                    pages, lengths = pages.clone(), lengths.copy()
                    pages[first:end, : rest.shape[1]] = rest
                    lengths[first:end] -= num_pages * layers.page_size
            columns = page_columns(lengths, layers.page_size)
            plan_paged(layers, self._paged, queries, lengths, columns, flat_pages(pages, columns[0])[1])
        if self._has_fresh:
            fresh = query_lengths[num_paged:]
            plan_packed(layers, self._ragged, fresh, fresh)
        layers.copied.record()

    def _plan_shared(self, page_ids: Ints32, tokens: slice) -> None:
        """Plan the attention of tokens to shared pages. page_ids: [P] on the host."""
        layers, num_tokens = self._layers, tokens.stop - tokens.start
        num_kv_heads, page_size = layers.shape.num_kv_heads, layers.page_size
        num_positions = len(page_ids) * page_size
        heads = page_ids[:, None].astype(np.int64) * num_kv_heads + np.arange(num_kv_heads)  # [P, K] of the pool
        indices = heads[:, None, :] * page_size + np.arange(page_size)[:, None]
        self._shared = tokens, uploaded(indices.reshape(-1), layers.device)
        query_lengths, kv_lengths = np.array([[num_tokens], [num_positions]], dtype=np.int32)
        plan_packed(layers, self._prefix, query_lengths, kv_lengths, is_causal=False)

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        split = self._num_paged  # a slice takes 1 to 3 us of the host, so layers share them
        paged_q, paged_out = q[:split], out[:split]
        fresh, fresh_out = (q[split:], k[split:], v[split:]), out[split:]

        def attend(layer: int) -> None:
            pool, sinks = self._layers.pool[layer], self._layers.rules[layer].sinks
            if self._shared is not None:
                _, log_sums = self._paged.run(paged_q, pool, out=paged_out, return_lse=True)
                tokens, indices = self._shared
                _, num_kv_heads, _, head_size = pool[0].shape
                keys, values = (
                    side.view(-1, head_size).index_select(0, indices).view(-1, num_kv_heads, head_size) for side in pool
                )
                merge(out[tokens], log_sums[tokens], *self._prefix.run(q[tokens], keys, values, return_lse=True))
            elif split:
                _run(self._paged, paged_q, pool, out=paged_out, sinks=sinks)
            if self._has_fresh:
                _run(self._ragged, *fresh, out=fresh_out, sinks=sinks)

        return attend

    def warm_up(self) -> None:
        """Compile the merge kernel."""
        layers = self._layers
        out = torch.zeros(1, layers.shape.num_heads, layers.shape.head_size, dtype=layers.dtype, device=layers.device)
        log_sums = torch.zeros(1, layers.shape.num_heads, device=out.device)
        merge(out, log_sums, out, log_sums)


class ConvertedRows:
    """Attention of the prefill rows of a step if the pool has another dtype than queries.

    Keys and values of all positions are copied from the pool and converted. Steps with few tokens or many positions
    read the pages with our Triton kernels instead.
    """

    def __init__(self, layers: FlashInferLayers) -> None:
        self._layers = layers
        self._over_pages = TritonAttention(layers)
        self._packed = BatchPrefillWithRaggedKVCacheWrapper(layers.workspace, "NHD")
        self._slots: Tensor | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        layers, total = self._layers, int(kv_lengths.sum())
        self._slots = None
        if int(query_lengths.sum()) < MIN_FRESH_TOKENS or total * layers.position_bytes > MAX_COPY_BYTES:
            self._over_pages.prepare(batch)
            return
        rows = np.repeat(np.arange(len(kv_lengths), dtype=np.int32), kv_lengths)
        positions = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(kv_lengths) - kv_lengths, kv_lengths)
        row_ids, places = uploaded(np.stack((rows, positions.astype(np.int32))), layers.device)
        page_ids = batch.page_table[row_ids, places // layers.page_size]
        self._slots = page_ids * layers.page_size + places % layers.page_size
        layers.copied.synchronize()
        plan_packed(layers, self._packed, query_lengths, kv_lengths)
        layers.copied.record()

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E] -> out [T, H, E]; k and v are read in the pool."""
        slots = self._slots
        if slots is None:
            return self._over_pages.bind(q, k, v, out=out)

        def attend(layer: int) -> None:
            rules = self._layers.rules[layer]
            converted = convert(self._layers.pool[layer], slots, q.dtype, rules.scales)
            _run(self._packed, q, *converted, out=out, sinks=rules.sinks)

        return attend


def plan_packed(
    layers: FlashInferLayers,
    wrapper: BatchPrefillWithRaggedKVCacheWrapper,
    query_lengths: Ints32,
    kv_lengths: Ints32,
    *,
    is_causal: bool = True,
) -> None:
    """Plan R rows with packed keys and values, for ``query_lengths`` [R] tokens and ``kv_lengths`` [R] positions."""
    query_starts = starts_of(query_lengths)
    wrapper.plan(
        query_starts,
        query_starts if kv_lengths is query_lengths else starts_of(kv_lengths),
        *layers.heads(),
        causal=is_causal,
        **layers.plan_options,
        window_left=layers.window_left,
        max_token_per_sequence=int(query_lengths.max()),
        max_sequence_kv=int(kv_lengths.max()),
    )


def plan_paged(
    layers: FlashInferLayers,
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    query_lengths: Ints32,
    kv_lengths: Ints32,
    columns: tuple[Tensor, Tensor],
    page_ids: Tensor,
    *,
    is_causal: bool = True,
) -> None:
    """Plan R rows of ``query_lengths`` [R] tokens and ``kv_lengths`` [R] positions, both may be 0.

    columns: ``page_columns`` of the rows. page_ids: the concatenated page tables [X], on the device.
    The caller waits for ``FlashInferLayers.copied`` before this call, and records it afterwards.
    """
    wrapper.plan(
        starts_of(query_lengths),
        columns[0],
        page_ids,
        columns[1],
        *layers.heads(),
        layers.page_size,
        causal=is_causal,
        **layers.plan_options,
        window_left=layers.window_left,
        seq_lens=pinned(kv_lengths),
        max_token_per_sequence=int(query_lengths.max()),
    )


class FixedFlashInferCascade(FixedDecodeRows):
    """Implements ``FixedCascade``. FlashInfer reads the shared pages, our decode kernel the pages in the buffers."""

    def __init__(self, layers: FlashInferLayers, num_rows: int, buffers: DecodeBuffers) -> None:
        super().__init__(layers, num_rows, buffers)
        self._flashinfer_layers = layers
        self._num_rows = num_rows
        # One FlashInfer row is a group of rows. The last one has the rows without shared pages.
        sizes = MAX_GROUPS + 2, MAX_GROUPS + 2, MAX_GROUPS * buffers.max_pages, MAX_GROUPS + 1
        query_starts, page_starts, page_ids, last_lengths = (
            torch.zeros(size, dtype=torch.int32, device=layers.device) for size in sizes
        )
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            layers.workspace,
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=query_starts,
            paged_kv_indptr_buf=page_starts,
            paged_kv_indices_buf=page_ids,
            paged_kv_last_page_len_buf=last_lengths,
        )
        plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=layers.device)
        self._wrapper.reset_workspace_buffer(layers.workspace, plan)
        row_ends, num_pages, page_ids = np.array([[num_rows], [1], [0]], dtype=np.int32)
        self.plan_shared(SharedPages(row_ends, num_pages, page_ids))  # for the capture: all rows share page 0

    def plan_shared(self, pages: SharedPages) -> None:
        """Plan the shared pages of these groups, before their first replay."""
        layers = self._flashinfer_layers
        missing = MAX_GROUPS + 1 - len(pages.num_pages)
        row_ends = np.append(pages.row_ends, np.int32(self._num_rows))
        query_lengths = np.pad(np.diff(row_ends, prepend=np.int32(0)), (0, missing - 1))
        kv_lengths = np.pad(pages.num_pages, (0, missing)) * np.int32(layers.page_size)
        columns = page_columns(kv_lengths, layers.page_size)
        page_ids = uploaded(pages.page_ids, layers.device)
        layers.copied.synchronize()
        plan_paged(layers, self._wrapper, query_lengths, kv_lengths, columns, page_ids, is_causal=False)
        layers.copied.record()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [R, H, E], k and v [R, K, E] -> [R, H * E]."""
        prefix = self._wrapper.run(q, self._layers.pool[layer], return_lse=True)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._layers.decode(q, self._rows, layer, out=out, other=prefix)
        return out.view(q.shape[0], -1)
