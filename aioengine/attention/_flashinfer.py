"""FlashInfer's prefill kernels: for rows of several tokens, and for cascade attention of decode rows.

Rows whose keys and values are all computed in this step ("fresh" rows) read them from the tensors of the step. This is
20% faster than reading pages. Other rows read pages.

In cascade attention, decode rows with the same first pages attend to these pages in one non-causal prefill. The decode
kernel attends to the other pages, and merges both results. Prefill rows with the same first pages do this too, but the
keys and values of the shared pages are copied first. To merge results, FlashInfer returns the log-sum-exp of the scores
("weights", in base 2).

T packed tokens, R rows, H query heads, K kv heads, E head size, N pages of the pool, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from aioengine.attention._base import CascadeLimits, SharedPages
from aioengine.attention._gpu_rows import FixedDecodeRows, flat_pages, layer_rules, page_columns, pinned, starts_of
from aioengine.attention._shared_rows import SharedRows, find_shared
from aioengine.kernels.triton.decode import decode
from aioengine.kernels.triton.merge import add_sinks, merge

if TYPE_CHECKING:
    import numpy.typing as npt

    from aioengine.attention._base import AttentionShape, DecodeBuffers
    from aioengine.kernels.kv_target import KVTarget
    from aioengine.kernels.triton.scores import ScoreRules

    Ints = npt.NDArray[np.int32]
    Pool = tuple[Tensor, Tensor]

WORKSPACE_BYTES = 512 << 20
_workspaces: WeakValueDictionary[torch.device, Tensor] = WeakValueDictionary()
"""One workspace per device, shared by all backends: kernels of a stream run one after the other."""
PLAN_BYTES = 1 << 20
"""Size of a plan of few rows and tokens, on the device and on the host."""
MIN_FRESH_TOKENS = 256
"""With fewer tokens, a separate plan costs more than it saves."""
MAX_GROUPS = 8
MIN_ROWS = 48
"""Limits of cascade attention in decode steps, see ``CascadeLimits``."""
MIN_SAVED_BYTES = 256 << 20
"""A group of rows must save reading at least this many bytes of keys and values per layer. On an H200, 64 rows of an 8B
model that share 1024 tokens take equally long with and without cascade.
"""


@dataclass(frozen=True, slots=True)
class Shared:
    """State shared by all plans of a backend.

    Attributes:
        pool: for each layer, keys and values [N, K, S, E].
        rules: for each layer.
        copied: recorded when a plan is queued for copying. The host must wait for it before it writes the next plan.
    """

    shape: AttentionShape
    pool: list[Pool]
    rules: list[ScoreRules]
    workspace: Tensor
    copied: torch.cuda.Event
    dtype: torch.dtype

    @classmethod
    def make(cls, shape: AttentionShape, kv_pool: Tensor) -> Shared:
        """kv_pool: [L, 2, N, K, S, E]."""
        device = kv_pool.device
        workspace = _workspaces.get(device)
        if workspace is None:
            workspace = _workspaces[device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        pool = [(layer[0], layer[1]) for layer in kv_pool]
        return cls(shape, pool, layer_rules(shape), workspace, torch.cuda.Event(), kv_pool.dtype)

    @property
    def page_size(self) -> int:
        return self.pool[0][0].shape[2]

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
    def can_share(self) -> bool:
        """Whether rows can attend to shared pages separately."""
        return self.shape.common_window is None

    @property
    def window_left(self) -> int:
        """Number of earlier positions that a token attends to; -1: all."""
        window = self.shape.common_window
        return -1 if window is None else window - 1


class SharedPrefix:
    """Attention of adjacent prefill rows to their shared first pages."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(shared.workspace, "NHD")
        self._pool_indices = torch.empty(0, dtype=torch.int64, device=shared.workspace.device)
        self._tokens = slice(0)

    def plan(self, page_ids: Ints, first_token: int, num_tokens: int) -> None:
        """Plan a step. page_ids: [P] on the host.

        The caller waits for ``Shared.copied`` before this call, and records it afterwards.
        """
        shared, num_positions = self._shared, len(page_ids) * self._shared.page_size
        _, num_kv_heads, page_size, _ = shared.pool[0][0].shape
        heads = page_ids[:, None].astype(np.int64) * num_kv_heads + np.arange(num_kv_heads)  # [P, K] of the pool
        indices = heads[:, None, :] * page_size + np.arange(page_size)[:, None]
        self._tokens = slice(first_token, first_token + num_tokens)
        self._pool_indices = pinned(indices.reshape(-1)).to(shared.workspace.device, non_blocking=True)
        self._wrapper.plan(
            starts_of(np.array([num_tokens], dtype=np.int32)),
            starts_of(np.array([num_positions], dtype=np.int32)),
            *shared.heads(),
            causal=False,
            **shared.plan_options,
            max_token_per_sequence=num_tokens,
            max_sequence_kv=num_positions,
        )

    def add(self, q: Tensor, pool: Pool, out: Tensor, weights: Tensor) -> None:
        """Attend to the planned pages and merge the result into ``out``: q and out [T, H, E].

        weights: [T, H], log-sum-exp of the scores behind ``out``.
        """
        _, num_kv_heads, _, head_size = pool[0].shape
        keys, values = (
            side.view(-1, head_size).index_select(0, self._pool_indices).view(-1, num_kv_heads, head_size)
            for side in pool
        )
        tokens = self._tokens
        merge(out[tokens], weights[tokens], *self._wrapper.run(q[tokens], keys, values, return_lse=True))

    def warm_up(self) -> None:
        """Compile the merge kernel."""
        num_heads, _, head_size = self._shared.heads()
        out = torch.zeros(1, num_heads, head_size, dtype=self._shared.dtype, device=self._pool_indices.device)
        weights = torch.zeros(1, num_heads, device=out.device)
        merge(out, weights, out, weights)


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
        _, weights = wrapper.run(*inputs, out=out, return_lse=True)
        add_sinks(out, weights, sinks)


class PrefillRows:
    """Attention of the prefill rows of a step: first the rows that read pages, then the fresh rows."""

    def __init__(self, shared: Shared) -> None:
        self.prefix = SharedPrefix(shared)
        self._shared = shared
        self._is_shared = False
        self._paged = BatchPrefillWithPagedKVCacheWrapper(shared.workspace, "HND")
        self._ragged = BatchPrefillWithRaggedKVCacheWrapper(shared.workspace, "NHD")
        self._num_paged = 0
        self._has_fresh = False

    def plan(self, page_table: Tensor, query_lengths: Ints, kv_lengths: Ints, host_pages: Ints | None = None) -> None:
        """Plan R >= 1 rows: page_table [R, P] on the device, lengths [R] and host_pages [R, P] on the host."""
        num_rows = len(query_lengths)
        continued = np.flatnonzero(kv_lengths > query_lengths)
        num_paged = int(continued[-1]) + 1 if continued.size else 0
        self._has_fresh = int(query_lengths[num_paged:].sum()) >= MIN_FRESH_TOKENS
        if not self._has_fresh:
            num_paged = num_rows
        self._num_paged = int(query_lengths[:num_paged].sum())
        shared = self._shared
        shared.copied.synchronize()
        self._is_shared = False
        if num_paged:
            pages, lengths, queries = page_table[:num_paged], kv_lengths[:num_paged], query_lengths[:num_paged]
            if host_pages is not None and shared.can_share and not shared.shape.sinks:
                shared_rows = find_shared(host_pages[:num_paged], queries, lengths, shared.page_size)
                if shared_rows is not None:
                    page_ids = host_pages[shared_rows.first, : shared_rows.num_pages]
                    pages, lengths = self._plan_shared(
                        shared_rows, page_ids, page_table=pages, query_lengths=queries, kv_lengths=lengths
                    )
            starts, last_lengths = page_columns(lengths, shared.page_size)
            plan_paged(shared, self._paged, queries, Pages(lengths, starts, flat_pages(pages, starts)[1], last_lengths))
        if self._has_fresh:
            starts, longest = starts_of(query_lengths[num_paged:]), int(query_lengths[num_paged:].max())
            self._ragged.plan(
                starts,
                starts,
                *shared.heads(),
                causal=True,
                **shared.plan_options,
                window_left=shared.window_left,
                max_token_per_sequence=longest,
                max_sequence_kv=longest,
            )
        shared.copied.record()

    def attend(self, q: Tensor, kv: Pool, layer: int, out: Tensor) -> None:
        """Attend: q and out [T, H, E] of these rows, keys and values [T, K, E], which are also in their slots."""
        split, pool, sinks = self._num_paged, self._shared.pool[layer], self._shared.rules[layer].sinks
        if split and self._is_shared:
            _, weights = self._paged.run(q[:split], pool, out=out[:split], return_lse=True)
            self.prefix.add(q, pool, out, weights)
        elif split:
            _run(self._paged, q[:split], pool, out=out[:split], sinks=sinks)
        if self._has_fresh:
            _run(self._ragged, q[split:], kv[0][split:], kv[1][split:], out=out[split:], sinks=sinks)

    def _plan_shared(
        self, rows: SharedRows, page_ids: Ints, *, page_table: Tensor, query_lengths: Ints, kv_lengths: Ints
    ) -> tuple[Tensor, Ints]:
        """Plan the shared pages. Return page_table [R, P] and kv_lengths [R] without these pages."""
        first, end, num_pages = rows
        self._is_shared = True
        first_token, num_tokens = int(query_lengths[:first].sum()), int(query_lengths[first:end].sum())
        self.prefix.plan(page_ids, first_token, num_tokens)
        rest, lengths = page_table.clone(), kv_lengths.copy()
        rest[first:end, : page_table.shape[1] - num_pages] = page_table[first:end, num_pages:]
        lengths[first:end] -= num_pages * self._shared.page_size
        return rest, lengths


class Pages(NamedTuple):
    """The pages of R rows.

    Attributes:
        lengths: [R] number of positions of each row, may be 0.
        starts: [R + 1], start of each row in ``page_ids``.
        page_ids: the concatenated page tables, on the device.
        last_lengths: [R] number of positions on the last page of each row.
    """

    lengths: Ints
    starts: Tensor
    page_ids: Tensor
    last_lengths: Tensor


def plan_paged(
    shared: Shared,
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    query_lengths: Ints,
    pages: Pages,
    *,
    is_causal: bool = True,
) -> None:
    """Plan R rows of ``query_lengths`` [R] tokens, which may be 0.

    The caller waits for ``Shared.copied`` before this call, and records it afterwards.
    """
    wrapper.plan(
        starts_of(query_lengths),
        pages.starts,
        pages.page_ids,
        pages.last_lengths,
        *shared.heads(),
        shared.page_size,
        causal=is_causal,
        **shared.plan_options,
        window_left=shared.window_left,
        seq_lens=pinned(pages.lengths),
        max_token_per_sequence=int(query_lengths.max()),
    )


def fixed_wrapper(shared: Shared, *, num_rows: int, num_pages: int) -> BatchPrefillWithPagedKVCacheWrapper:
    """Return a wrapper for CUDA graphs, for ``num_rows`` rows with at most ``num_pages`` pages in total."""
    device = shared.workspace.device

    def column(size: int) -> Tensor:
        """[size] int32 zeros."""
        return torch.zeros(size, dtype=torch.int32, device=device)

    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        shared.workspace,
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=column(num_rows + 1),
        paged_kv_indptr_buf=column(num_rows + 1),
        paged_kv_indices_buf=column(num_pages),
        paged_kv_last_page_len_buf=column(num_rows),
    )
    wrapper.reset_workspace_buffer(shared.workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device))
    return wrapper


def cascade_limits(shared: Shared) -> CascadeLimits:
    _, num_kv_heads, head_size = shared.heads()
    page_bytes = 2 * shared.page_size * num_kv_heads * head_size * shared.dtype.itemsize
    return CascadeLimits(MIN_ROWS, MIN_SAVED_BYTES // page_bytes, MAX_GROUPS)


class FixedFlashInferCascade:
    """Implements ``FixedCascade``. FlashInfer reads the shared pages, our decode kernel the pages in the buffers."""

    def __init__(self, shared: Shared, num_rows: int, buffers: DecodeBuffers) -> None:
        self._shared = shared
        self._num_rows = num_rows
        self._own = FixedDecodeRows(shared.shape, shared.pool, num_rows, buffers)
        self._slots = buffers.slot_mapping
        # One FlashInfer row is a group of rows. The last one has the rows without shared pages.
        self._wrapper = fixed_wrapper(shared, num_rows=MAX_GROUPS + 1, num_pages=MAX_GROUPS * buffers.max_pages)

    def plan_first(self, kv_lengths: Ints) -> None:
        """Plan the capture, for rows of ``kv_lengths`` [R] positions. All rows share page 0."""
        self._own.plan_first(kv_lengths)
        one = np.ones(1, dtype=np.int32)
        self.plan_shared(SharedPages(one * self._num_rows, one, np.zeros(1, dtype=np.int32)))

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Plan the pages that rows do not share: starts [R + 1] and last_lengths [R], int32 on the host."""
        self._own.plan(starts, last_lengths)

    def plan_shared(self, pages: SharedPages) -> None:
        """Plan the shared pages of these groups, before their first replay."""
        shared = self._shared
        missing = MAX_GROUPS + 1 - len(pages.num_pages)
        row_ends = np.append(pages.row_ends, np.int32(self._num_rows))
        query_lengths = np.pad(np.diff(row_ends, prepend=np.int32(0)), (0, missing - 1))
        kv_lengths = np.pad(pages.num_pages, (0, missing)) * np.int32(shared.page_size)
        starts, last_lengths = page_columns(kv_lengths, shared.page_size)
        page_ids = pinned(pages.page_ids).to(self._slots.device, non_blocking=True)
        shared.copied.synchronize()
        shared_pages = Pages(kv_lengths, starts, page_ids, last_lengths)
        plan_paged(shared, self._wrapper, query_lengths, shared_pages, is_causal=False)
        shared.copied.record()

    def target(self, layer: int) -> KVTarget:
        return self._own.target(layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [R, H, E], k and v [R, K, E] -> [R, H * E]."""
        pool = self._shared.pool[layer]
        prefix = self._wrapper.run(q, pool, return_lse=True)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale, rules = self._shared.shape.scale, self._shared.rules[layer]
        decode(q, pool, self._own.rows, scale=scale, out=out, other=prefix, rules=rules)
        return out.view(q.shape[0], -1)
