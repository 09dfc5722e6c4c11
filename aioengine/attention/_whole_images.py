"""Attention of models whose images see themselves whole: each token of an image attends to all tokens of it, later ones
too (Gemma 3). Beside that it is causal, and has the windows of its layers.

A backend computes all tokens as causal ones. Those of images are then computed once more, here, in plain torch: an
image has a few hundred tokens, and is computed in one step as far as the prefix cache has none of it. On a CPU a token
gets the same bits as in any other chunk, as in ``attention/torch.py``: blocks of tokens are aligned from position 0.

T packed tokens, H query heads, K kv heads, G query heads of a kv head, E head size, N pages of the pool, S page size, B
tokens of a block, C positions that it sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import torch

from aioengine.attention._base import AttentionBackend, CapturableAttention, keys_and_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.attention._base import (
        AttentionShape,
        DecodeBuffers,
        FixedDecode,
        ForwardBatch,
        WholeImage,
        WriteKV,
    )
    from aioengine.kernels.rotate_and_write import KVTarget

BLOCK = 8


@runtime_checkable
class _GPUAttention(CapturableAttention, Protocol):
    """What backends on a GPU implement: ``PiecewiseAttention`` too."""

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        ...


Inner = TypeVar("Inner", bound=AttentionBackend)


class WholeImages(Generic[Inner]):
    """Implements ``AttentionBackend`` over another one."""

    def __init__(self, inner: Inner, shape: AttentionShape, kv_layers: Sequence[Tensor]) -> None:
        """kv_layers: [2, N, K, S, E] of each layer, which ``inner`` writes."""
        assert not shape.sinks
        self._inner = inner
        self._shape = shape
        self._kv_pool = keys_and_values(kv_layers, shape)
        self._images: list[tuple[WholeImage, Tensor]] = []  # with their pages

    def prepare(self, batch: ForwardBatch) -> None:
        self._inner.prepare(batch)
        page_size = self._kv_pool[0][0].shape[2]
        self._images = [
            (image, batch.page_table[image.row, : -(-image.stop // page_size)]) for image in batch.whole_images
        ]

    def target(self, layer: int) -> KVTarget | WriteKV:
        return self._inner.target(layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        out = self._inner.attend(q, k, v, layer)
        self._see_images(q, layer, out.view(q.shape))
        return out

    def _see_images(self, q: Tensor, layer: int, out: Tensor) -> None:
        """The tokens of images: q [T, H, E] -> out [T, H, E]."""
        for image, pages in self._images:
            keys, values = (
                side[pages].transpose(0, 1).flatten(1, 2)[:, : image.stop].float() for side in self._kv_pool[layer]
            )  # [K, stop, E]
            size, begin = BLOCK, image.start // BLOCK * BLOCK
            if q.is_cuda:
                size, begin = image.stop - image.start, image.start
            for start in range(begin, image.stop, size):
                low, high = max(image.start, start), min(image.stop, start + size)
                tokens = slice(image.first + low - image.start, image.first + high - image.start)
                queries = q.new_zeros(size, *q.shape[1:], dtype=torch.float32)
                queries[low - start : high - start] = q[tokens].float()
                found = self._block(queries, start, layer, keys=keys, values=values)
                out[tokens] = found[low - start : high - start].to(out.dtype)

    def _block(self, queries: Tensor, start: int, layer: int, *, keys: Tensor, values: Tensor) -> Tensor:
        """Tokens from position ``start`` on: queries [B, H, E] over keys and values [K, C, E] -> [B, H, E]."""
        shape, num_tokens, num_positions = self._shape, len(queries), keys.shape[1]
        window = shape.window(layer, num_positions)
        first = 0 if window is None else max(start - window + 1, 0)
        grouped = (queries * shape.scale).unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # [K, G, B, E]
        scores = torch.bmm(grouped.flatten(1, 2), keys[:, first:].transpose(1, 2)).view(*grouped.shape[:3], -1)
        if shape.soft_cap is not None:
            scores = scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
        if window is not None:
            places = torch.arange(start, start + num_tokens, device=keys.device).unsqueeze(1)
            positions = torch.arange(first, num_positions, device=keys.device)
            scores = scores.masked_fill_(positions <= places - window, float("-inf"))
        weights = torch.softmax(scores, -1).flatten(1, 2)
        attended = torch.bmm(weights, values[:, first:]).view(grouped.shape)
        return attended.permute(2, 0, 1, 3).flatten(1, 2)


class WholeImagesOnGPU(WholeImages[_GPUAttention]):
    """Implements ``CapturableAttention`` and ``PiecewiseAttention``: steps that decode have no image."""

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        self._inner.attend_into(q, k, v, layer, out=out)
        self._see_images(q, layer, out)

    def warm_up(self) -> None:
        self._inner.warm_up()

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedDecode:
        """Decode steps of ``num_rows`` rows."""
        return self._inner.fixed_decode(num_rows, buffers)


def build(inner: AttentionBackend, shape: AttentionShape, kv_pools: Sequence[Tensor]) -> AttentionBackend:
    """``inner`` with images. kv_pools: [L, 2, N, K, S, E] of the groups of layers (``AttentionShape.groups``)."""
    by_layer = {
        layer: each
        for layers, kv_pool in zip(shape.groups, kv_pools, strict=True)
        for layer, each in zip(layers, kv_pool, strict=True)
    }
    kv_layers = [by_layer[layer] for layer in sorted(by_layer)]
    if isinstance(inner, _GPUAttention):
        return WholeImagesOnGPU(inner, shape, kv_layers)
    return WholeImages(inner, shape, kv_layers)
