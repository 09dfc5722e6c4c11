"""Attention on an NVIDIA GPU with FlashInfer's prefill kernels and our own decode kernel.

A step is planned once for all layers. Rows of one token at the front of the batch use ``kernels/triton/decode.py``:
FlashInfer's decode kernels take longer per row, and their plan takes more time of the host. On an H200, 256 rows of 576
positions take 154 to 207 us per layer, and 148 us with our kernel. All other rows use FlashInfer's prefill kernel.

At the start ``_flashinfer_ready`` checks that FlashInfer has kernels for the model's dtype and sizes, and compiles
them. This takes about a minute, so a start does not wait for it: until then, our Triton kernels compute prefill rows,
and there is no cascade attention until the next start. ``_flashinfer`` plans and runs these kernels, also for cascade
attention: pages that many rows share are read once for all of them. Learned sinks are applied to the results
(``kernels/triton/scores.py``).

T packed tokens, R rows, H query heads, K kv heads, E head size, N pages of the pool, S page size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, CascadeLimits, DecodeBuffers, ForwardBatch
from aioengine.attention._compilation import kernels_ready
from aioengine.attention._flashinfer import (
    MIN_FRESH_TOKENS,
    ConvertedRows,
    FixedFlashInferCascade,
    FlashInferLayers,
    PrefillRows,
)
from aioengine.attention._gpu_rows import (
    FixedDecodeRows,
    decode_rows,
    flat_pages,
    num_decode_rows,
    page_columns,
    run_once,
)
from aioengine.attention.triton import TritonAttention
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.triton.decode import DecodeRows


class FlashInferAttention:
    """Implements ``CapturableAttention``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E]."""
        self._layers = FlashInferLayers.of(shape, kv_pool)
        self._flashinfer_prefill = (ConvertedRows if self._layers.is_quantized else PrefillRows)(self._layers)
        # Triton computes prefill rows until FlashInfer's kernels are compiled, see ``prepare``
        self._prefill: ConvertedRows | PrefillRows | TritonAttention = TritonAttention(self._layers)
        self._decode: DecodeRows | None = None
        self._slot_mapping = torch.empty(0, dtype=torch.int64, device=kv_pool.device)
        self._num_decode = 0
        self._unplanned: ForwardBatch | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        self._unplanned = batch  # planned in ``bind``, while the device computes the first operations of the step

    def _plan(self, batch: ForwardBatch) -> None:
        self._unplanned = None
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        num_decode = num_decode_rows(query_lengths)
        self._num_decode = num_decode
        self._decode = None
        if num_decode:
            starts, _ = page_columns(kv_lengths[:num_decode], self._layers.page_size)
            pages = flat_pages(batch.page_table[:num_decode], starts)
            self._decode = decode_rows(self._layers.shape, kv_lengths[:num_decode], *pages)
        if num_decode < len(query_lengths):
            if kernels_ready.is_set():
                self._prefill = self._flashinfer_prefill
            self._prefill.prepare(_prefill_rows(batch, num_decode) if num_decode else batch)

    def target(self, layer: int) -> KVTarget:
        return self._layers.target(self._slot_mapping, layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.bind(q, k, v, out=out)(layer)
        return out.view(q.shape[0], -1)

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        if self._unplanned is not None:
            self._plan(self._unplanned)
        split, decode, layers = self._num_decode, self._decode, self._layers
        prefill = None
        if split < q.shape[0]:
            prefill = self._prefill.bind(q[split:], k[split:], v[split:], out=out[split:])
        decode_q, decode_out = q[:split], out[:split]

        def attend(layer: int) -> None:
            if decode is not None:
                layers.decode(decode_q, decode, layer, out=decode_out)
            if prefill is not None:
                prefill(layer)

        return attend

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecodeRows:
        """Return attention for decode steps of ``num_rows`` rows."""
        return FixedDecodeRows(self._layers, num_rows, buffers)

    def warm_up(self) -> None:
        """Plan and run each kind of step once, to compile kernels."""
        # With a quantized pool, FlashInfer computes only steps of at least ``MIN_FRESH_TOKENS`` tokens.
        counts = (1, 2, MIN_FRESH_TOKENS) if self._layers.is_quantized else (1, 2)
        for count in counts:
            run_once(self, self._layers, 1, count)
        if isinstance(self._flashinfer_prefill, PrefillRows) and self._layers.shape.common_window is None:
            self._flashinfer_prefill.warm_up()


def _prefill_rows(batch: ForwardBatch, num_decode: int) -> ForwardBatch:
    """Return the batch without its first ``num_decode`` rows, which have one token each."""
    return ForwardBatch(
        slot_mapping=batch.slot_mapping[num_decode:],
        page_table=batch.page_table[num_decode:],
        query_lengths=batch.query_lengths[num_decode:],
        kv_lengths=batch.kv_lengths[num_decode:],
        host_pages=None if batch.host_pages is None else batch.host_pages[num_decode:],
    )


class CascadeFlashInferAttention(FlashInferAttention):
    """Implements ``CascadeAttention``, for models without windows."""

    @property
    def cascade_limits(self) -> CascadeLimits:
        return self._layers.cascade_limits

    def fixed_cascade(self, num_rows: int, buffers: DecodeBuffers) -> FixedFlashInferCascade:
        """Return attention for decode steps of ``num_rows`` rows with groups that share first pages."""
        return FixedFlashInferCascade(self._layers, num_rows, buffers)


def build(shape: AttentionShape, kv_pool: Tensor) -> FlashInferAttention:
    """Return the backend for this model. kv_pool: [L, 2, N, K, S, E].

    Cascade attention needs compiled kernels, no windows, and a pool with the dtype of queries.
    """
    has_cascade = kernels_ready.is_set() and shape.common_window is None and shape.dtype in {None, kv_pool.dtype}
    return (CascadeFlashInferAttention if has_cascade else FlashInferAttention)(shape, kv_pool)


PLUGIN = build
