"""Attention with FlashInfer's kernels on an NVIDIA GPU, and a kernel of our own for rows that compute one token.

A step is planned once for all layers. Rows of one token at the front of the batch go through
``kernels/triton/decode.py``: FlashInfer's decode kernels have a higher cost per row (on an H200, 256 rows of 576
positions: 154 to 207 us a layer, our kernel 148), and their plan costs the host more. All other rows go through
FlashInfer's prefill kernel.

At the start ``_flashinfer_ready`` checks that FlashInfer has kernels for the types and sizes of the model, and compiles
them. Learned sinks are added to their results (``kernels/triton/merge.py``). FlashInfer's plans are written to pinned
memory and copied from there; a plan must not be written before the copy of the last one has ended, for which
``Staging`` of ``_flashinfer`` waits. ``_flashinfer`` also has cascade attention: pages that many rows share are read
once for all of them.

Shape letters: T packed tokens, R rows, H query heads, K kv heads, E head size, N pages of the pool, S page size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._flashinfer import FixedFlashInferCascade, PrefillRows, Shared, sharable
from aioengine.attention._gpu_rows import FixedDecodeRows, decode_rows, flat_pages, page_columns, run_once
from aioengine.kernels.rotate_and_write import KVTarget
from aioengine.kernels.triton.decode import decode

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch, Sharable
    from aioengine.kernels.triton.decode import DecodeRows

    Ints = npt.NDArray[np.int32]


class FlashInferAttention:
    """Implements ``CapturableAttention``. ``kv_pool``: [L, 2, N, K, S, E] in 16 bits."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E]."""
        self._shared = Shared.make(shape, kv_pool)
        self._prefill = PrefillRows(self._shared)
        self._decode: DecodeRows | None = None
        self._slot_mapping = torch.empty(0, dtype=torch.int64, device=kv_pool.device)
        self._num_decode = 0

    def prepare(self, batch: ForwardBatch) -> None:
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        longer = np.flatnonzero(query_lengths > 1)
        num_decode = int(longer[0]) if longer.size else len(query_lengths)
        self._slot_mapping = batch.slot_mapping
        self._num_decode = num_decode
        self._decode = None
        if num_decode:
            starts, _ = page_columns(kv_lengths[:num_decode], self._shared.page_size)
            pages = flat_pages(batch.page_table[:num_decode], starts)
            self._decode = decode_rows(self._shared.shape, kv_lengths[:num_decode], *pages)
        if num_decode < len(query_lengths):
            host_pages = None if batch.host_pages is None else batch.host_pages[num_decode:]
            lengths = query_lengths[num_decode:], kv_lengths[num_decode:]
            self._prefill.plan(batch.page_table[num_decode:], *lengths, host_pages)

    def target(self, layer: int) -> KVTarget:
        return KVTarget(self._slot_mapping, *self._shared.pool[layer])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend_into(q, k, v, layer, out=out)
        return out.view(q.shape[0], -1)

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        shared, split = self._shared, self._num_decode
        if self._decode is not None:
            pool, scale, rules = shared.pool[layer], shared.shape.scale, shared.rules[layer]
            decode(q[:split], pool, self._decode, scale=scale, out=out[:split], rules=rules)
        if split < q.shape[0]:
            self._prefill.attend(q[split:], (k[split:], v[split:]), layer, out[split:])

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecodeRows:
        """Decode steps of ``num_rows`` rows."""
        return FixedDecodeRows(self._shared.shape, self._shared.pool, num_rows, buffers)

    def warm_up(self) -> None:
        """Compile what is not compiled yet: a plan of each kind, and a first run."""
        run_once(self, self._shared.shape, self._shared.pool[0][0])
        if self._shared.can_share:
            self._prefill.beginning.warm_up()


class CascadeFlashInferAttention(FlashInferAttention):
    """Implements ``CascadeAttention`` too, for models without windows: what many rows share, all of them attend to."""

    @property
    def sharable(self) -> Sharable:
        return sharable(self._shared)

    def fixed_cascade(self, num_rows: int, buffers: DecodeBuffers) -> FixedFlashInferCascade:
        """Decode steps of ``num_rows`` rows of which groups start with the same pages."""
        return FixedFlashInferCascade(self._shared, num_rows, buffers)


def build(shape: AttentionShape, kv_pool: Tensor) -> FlashInferAttention:
    """kv_pool: [L, 2, N, K, S, E]."""
    return (CascadeFlashInferAttention if shape.only_window is None else FlashInferAttention)(shape, kv_pool)


PLUGIN = build
