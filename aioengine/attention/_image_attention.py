"""Bidirectional attention within images (Gemma 3): a token of an image attends to all tokens of the image, including
later ones. Other tokens are causal. Windows apply to both.

The inner backend computes all tokens as causal. Then image tokens are computed again, which is cheap: an image has a
few hundred tokens. The scheduler does not split an image, so its keys and values are complete in this step.

On a CPU, the result of a token does not depend on the chunks of its prompt. As in ``attention/torch.py``, tokens are
computed in blocks of ``BLOCK`` positions, counted from position 0.

T packed tokens, H query heads, K kv heads, G query heads per kv head, E head size, N pages of the pool, S page size,
C positions that tokens of an image attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import (
    AttentionBackend,
    AttentionShape,
    BidirectionalImage,
    CapturableAttention,
    DecodeBuffers,
    FixedDecode,
    ForwardBatch,
    pools_by_layer,
)
from aioengine.attention.torch import BLOCK, attend_block
from aioengine.kernels.kv_target import KVTarget, WriteKV, from_stored


class _ImageKV(NamedTuple):
    """Keys and values [K, C, E] of one layer, for the positions from ``first`` to the end of an image."""

    first: int
    window: int | None
    keys: Tensor
    values: Tensor


Inner = TypeVar("Inner", bound=AttentionBackend)


class ImageAttention(Generic[Inner]):
    """Implements ``AttentionBackend`` on top of another backend."""

    def __init__(self, inner: Inner, shape: AttentionShape, kv_layers: Sequence[Tensor]) -> None:
        """kv_layers: [2, N, K, S, E] of each layer, written by ``inner``."""
        assert not shape.sinks
        self._inner = inner
        self._shape = shape
        self._kv_layers = kv_layers
        self._is_on_gpu = kv_layers[0].is_cuda
        self._groups = shape.groups
        self._images: list[tuple[BidirectionalImage, list[Tensor]]] = []  # with its pages by layer

    def prepare(self, batch: ForwardBatch) -> None:
        self._inner.prepare(batch)
        if not batch.bidirectional_images:
            self._images = []
            return
        page_size = self._kv_layers[0].shape[3]
        tables = [batch.page_table] * self._shape.num_layers
        for layers, part in zip(self._groups, batch.parts, strict=False):
            for layer in layers:
                tables[layer] = part.page_table
        self._images = [
            (image, [table[image.row, : -(-image.stop // page_size)] for table in tables])
            for image in batch.bidirectional_images
        ]

    def target(self, layer: int) -> KVTarget | WriteKV:
        return self._inner.target(layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        out = self._inner.attend(q, k, v, layer)
        self._attend_images(q, layer, out.view(q.shape))
        return out

    def _attend_images(self, q: Tensor, layer: int, out: Tensor) -> None:
        """Compute the tokens of images again: q [T, H, E] -> out [T, H, E]."""
        for image, pages_of_layers in self._images:
            pages = pages_of_layers[layer]
            window = self._shape.window(layer, image.stop)
            # No token attends to earlier positions. The first block may begin before the image.
            first = 0 if window is None else max(image.start - BLOCK - window, 0)
            page_size = self._kv_layers[layer].shape[3]
            first = first // page_size * page_size
            stored = self._kv_layers[layer][:, pages[first // page_size :]].transpose(1, 2).flatten(2, 3)
            scales = self._shape.scales(layer)
            if scales is not None:
                scales = scales.view(2, 1, 1, 1)
            keys, values = from_stored(stored[:, :, : image.stop - first], q.dtype, scales)  # [K, C, E]
            is_fused = self._is_on_gpu and self._shape.soft_cap is None  # the fused kernels have no soft cap
            attend = self._attend_at_once if is_fused else self._attend_in_blocks
            attend(image, q, _ImageKV(first, window, keys, values), out=out)

    def _attend_at_once(self, image: BidirectionalImage, q: Tensor, kv: _ImageKV, *, out: Tensor) -> None:
        """Compute an image with torch's fused kernels: q [T, H, E] -> out [T, H, E]."""
        tokens = slice(image.first, image.first + image.stop - image.start)
        mask: Tensor | None = None
        if kv.window is not None:
            positions = torch.arange(image.start, image.stop, device=q.device).unsqueeze(1)
            mask = torch.arange(kv.first, image.stop, device=q.device) > positions - kv.window
        queries, keys, values = (part.unsqueeze(0) for part in (q[tokens].transpose(0, 1), kv.keys, kv.values))
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._shape.scale, enable_gqa=True
        )
        out[tokens] = attended[0].transpose(0, 1)

    def _attend_in_blocks(self, image: BidirectionalImage, q: Tensor, kv: _ImageKV, *, out: Tensor) -> None:
        """Compute an image with batch-invariant operations: q [T, H, E] -> out [T, H, E]."""
        keys, values = kv.keys.float(), kv.values.float()
        for begin in range(image.start // BLOCK * BLOCK, image.stop, BLOCK):
            skipped, is_hidden = 0, None
            if kv.window is not None:
                skipped = max(begin - kv.window + 1 - kv.first, 0)
                positions = torch.arange(kv.first + skipped, image.stop, device=q.device)
                is_hidden = positions <= torch.arange(begin, begin + BLOCK, device=q.device).unsqueeze(1) - kv.window
            low, high = max(image.start, begin), min(image.stop, begin + BLOCK)
            tokens = slice(image.first + low - image.start, image.first + high - image.start)
            inside, visible = slice(low - begin, high - begin), (keys[:, skipped:], values[:, skipped:])
            out[tokens] = attend_block(q[tokens], inside, *visible, is_hidden=is_hidden, shape=self._shape)


class CapturableImageAttention(ImageAttention[CapturableAttention]):
    """Implements ``CapturableAttention``. Decode steps have no image tokens, so the inner backend computes them."""

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        inner = self._inner.bind(q, k, v, out=out)

        def attend(layer: int) -> None:
            inner(layer)
            self._attend_images(q, layer, out)

        return attend

    def warm_up(self) -> None:
        self._inner.warm_up()

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        return self._inner.fixed_decode(num_rows, buffers)


def build(inner: AttentionBackend, shape: AttentionShape, kv_pools: Sequence[Tensor]) -> AttentionBackend:
    """Add image attention to ``inner``. kv_pools: [L, 2, N, K, S, E] of each group in ``AttentionShape.groups``."""
    kv_layers = pools_by_layer(shape.groups, kv_pools)
    if isinstance(inner, CapturableAttention):
        return CapturableImageAttention(inner, shape, kv_layers)
    return ImageAttention(inner, shape, kv_layers)
