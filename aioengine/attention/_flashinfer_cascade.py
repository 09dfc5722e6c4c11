"""Decode rows that begin with the same pages: these are attended to once for all rows, like a prompt that sees all.

FlashInfer's prefill kernel does that, and the kernel for decode rows takes in what came of it.

R rows, H query heads, K kv heads, E head size, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import Sharable, SharedPages
from aioengine.attention._decode import FixedDecodeRows
from aioengine.attention._flashinfer_prefill import Pages, fixed_wrapper, plan_paged
from aioengine.attention._pages import page_columns, pinned
from aioengine.kernels.triton.decode import decode
from aioengine.kernels.triton.heads import write_pages

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import DecodeBuffers
    from aioengine.attention._flashinfer_prefill import Shared
    from aioengine.kernels.rotate_and_write import KVTarget

    Ints = npt.NDArray[np.int32]

MAX_GROUPS = 8
MIN_ROWS = 48
MIN_SPARED_BYTES = 256 << 20
"""Of keys and values of a layer. On an H200 64 rows of model b that share 1024 tokens take as long either way."""


def sharable(shared: Shared) -> Sharable:
    _, num_kv_heads, head_size = shared.heads()
    page_bytes = 2 * shared.page_size * num_kv_heads * head_size * shared.dtype.itemsize
    return Sharable(MIN_ROWS, MIN_SPARED_BYTES // page_bytes, MAX_GROUPS)


class FixedFlashInferCascade:
    """Decode steps of exactly so many rows, over buffers that somebody else fills with what is each row's own."""

    def __init__(self, shared: Shared, num_rows: int, buffers: DecodeBuffers) -> None:
        self._shared = shared
        self._num_rows = num_rows
        self._own = FixedDecodeRows(shared.shape, shared.pool, num_rows, buffers)
        self._slots = buffers.slot_mapping
        # one group more: the rows that share nothing
        self._wrapper = fixed_wrapper(shared, num_rows=MAX_GROUPS + 1, num_pages=MAX_GROUPS * buffers.max_pages)

    def plan_first(self, kv_lengths: Ints) -> None:
        """Before the capture: all rows share page 0."""
        self._own.plan_first(kv_lengths)
        one = np.ones(1, dtype=np.int32)
        self.plan_shared(SharedPages(one * self._num_rows, one, np.zeros(1, dtype=np.int32)))

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        self._own.plan(starts, last_lengths)

    def plan_shared(self, pages: SharedPages) -> None:
        """Before the first replay with these groups."""
        shared = self._shared
        missing = MAX_GROUPS + 1 - len(pages.num_pages)
        row_ends = np.append(pages.row_ends, np.int32(self._num_rows))
        query_lengths = np.pad(np.diff(row_ends, prepend=np.int32(0)), (0, missing - 1))
        kv_lengths = np.pad(pages.num_pages, (0, missing)) * np.int32(shared.page_size)
        starts, last_lengths = page_columns(kv_lengths, shared.page_size)
        page_ids = pinned(pages.page_ids).to(self._slots.device, non_blocking=True)
        shared.staging.wait()
        planned = Pages(kv_lengths, starts, page_ids, last_lengths)
        plan_paged(shared, self._wrapper, query_lengths, planned, is_causal=False)
        shared.staging.mark()

    def prepare(self, batch: object) -> None:
        """Nothing: ``plan`` has done it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        write_pages(k, v, self._slots, self._shared.pool[layer])
        return self.attend(q, k, v, layer)

    def target(self, layer: int) -> KVTarget:
        return self._own.target(layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        pool = self._shared.pool[layer]
        beginnings = self._wrapper.run(q, pool, return_lse=True)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode(q, pool, self._own.rows, scale=self._shared.shape.scale, out=out, other=beginnings)
        return out.view(q.shape[0], -1)
