"""Bidirectional attention for encoders: each row is computed in one step, so there is no KV cache.

On a GPU in 16 bits, one kernel (torch's flash attention) computes all rows of a step. Otherwise, adjacent rows of equal
length are computed in one call of torch's attention, whose results do not depend on the number of rows.

T packed tokens, H query heads, K kv heads, E head size, R rows.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionShape, ForwardBatch
from aioengine.kernels.kv_target import WriteKV


def _discard(k: Tensor, v: Tensor) -> None:
    """Ignore k and v [T, K, E]: there is no KV cache."""


class _PackedRows:
    """Attention of rows with up to ``longest`` tokens, by the kernel."""

    def __init__(self, shape: AttentionShape, starts: Tensor, longest: int) -> None:
        """starts: [R + 1] int32 on the device."""
        self._shape = shape
        self._starts = starts
        self._longest = longest

    def target(self, layer: int) -> WriteKV:
        return _discard

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        window = self._shape.window(layer, self._longest)
        reach = -1 if window is None else window
        outputs: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward.default(
            q,
            k,
            v,
            cum_seq_q=self._starts,
            cum_seq_k=self._starts,
            max_q=self._longest,
            max_k=self._longest,
            dropout_p=0.0,
            is_causal=False,
            return_debug_mask=False,
            scale=self._shape.scale,
            window_size_left=reach,
            window_size_right=reach,
        )
        return outputs[0].flatten(1)


class PackedAttention:
    """Implements ``AttentionBackend`` with an empty pool."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [0, 2, N, K, S, E], only for its dtype and device."""
        self._shape = shape
        self.device = kv_pool.device
        self.has_kernel = kv_pool.is_cuda and kv_pool.dtype != torch.float32
        self._packed: _PackedRows | None = None
        self._rows: list[tuple[slice, int]] = []  # the tokens of adjacent rows of equal length, and this length
        self._longest = 0

    def prepare(self, batch: ForwardBatch) -> None:
        lengths = batch.query_lengths
        assert lengths == batch.kv_lengths, "bidirectional rows must be computed in one step"
        self._longest = max(lengths)
        if self.has_kernel:
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            starts = ends.pin_memory().to(self.device, non_blocking=True)
            self._packed = self.fixed_rows(starts, self._longest)
            return
        self._rows, start = [], 0
        for length, same in groupby(lengths):
            end = start + sum(same)
            self._rows.append((slice(start, end), length))
            start = end

    def fixed_rows(self, starts: Tensor, max_length: int) -> _PackedRows:
        """See ``FullGraphAttention``. Needs ``has_kernel``. starts: [R + 1] int32."""
        return _PackedRows(self._shape, starts, max_length)

    def target(self, layer: int) -> WriteKV:
        return _discard

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        if self._packed is not None:
            return self._packed.attend(q, k, v, layer)
        window = self._shape.window(layer, self._longest)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tokens, length in self._rows:
            heads = (part[tokens].unflatten(0, (-1, length)).transpose(1, 2) for part in (q, k, v))
            mask: Tensor | None = None
            if window is not None and window < length:
                positions = torch.arange(length, device=out.device)
                mask = (positions - positions.unsqueeze(1)).abs() <= window
            attended = functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=self._shape.scale, enable_gqa=k.shape[1] != q.shape[1]
            )
            out[tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out.flatten(1)


PLUGIN = PackedAttention
