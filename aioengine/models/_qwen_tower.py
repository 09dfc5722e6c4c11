"""The vision towers of Qwen: the modules of transformers, run in one pass over the packed patches of an image.

transformers loops over the windows of an image in Python, and asks the device for the sizes of its grid. Here what
depends on the grid is made on the host, once for each grid, and attention is that of encoders.

Shape letters: N patches of an image, M tokens of it (N / merge^2), H heads, E head size, D size of the tower, X size of
the text model, K layers with further features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from aioengine.attention._base import AttentionShape, ForwardBatch, kv_pool_shape
from aioengine.attention.packed import PackedAttention
from aioengine.kernels.add_layer_norm import add_layer_norm
from aioengine.kernels.add_rms_norm import add_rms_norm
from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.rotate_heads import rotate_heads
from aioengine.kernels.silu_and_mul import silu_and_mul
from aioengine.models._image_decoder import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]

_EPSILON = 1e-6
"""Of the norms."""

_ALIGNMENT = 64

Grid = tuple[int, int, int]
"""Frames, height and width in patches."""


class TowerSizes(NamedTuple):
    """The facts about a tower. ``window``: the side of a window in tokens, where most layers attend within windows; 0:
    all attend to all of a frame. full_layers: those that do so beside windows. deepstack: layers with further features.
    """

    num_heads: int
    head_size: int
    merge: int
    theta: float
    window: int = 0
    full_layers: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the layers read of a grid.

    Attributes:
        tables: cos and sin [N, 1, E], as ``kernels.rope`` takes them.
        frames, windows: attention within each frame, and within each window.
        order: [M] the tokens as windows have them; None: as they are. inverse: [M] where each of them is then.
        corners: of the learned positions, 4 indices of each patch [N, 4] and their weights [N, 4]; None: none are
            learned.
    """

    tables: tuple[Tensor, Tensor]
    frames: PackedAttention
    windows: PackedAttention
    order: Tensor | None
    inverse: Tensor | None
    corners: tuple[Tensor, Tensor] | None


class GatedInner:
    """down(silu(gate(x)) * up(x)) [N, D] -> [N, D], with gate and up as one matmul.

    The inner size is padded with zeros to a multiple of ``_ALIGNMENT``: 3,420, which Qwen2.5-VL has, is none of 8, and
    matmuls of such sizes take three times as long. The parameters of the module become views of the padded tensors.
    """

    def __init__(self, mlp: Any) -> None:
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        inner, size = gate.weight.shape
        padded = -(-inner // _ALIGNMENT) * _ALIGNMENT
        self._first = gate.weight.new_zeros(2 * padded, size)
        self._first_bias = gate.weight.new_zeros(2 * padded)
        self._last = down.weight.new_zeros(down.weight.shape[0], padded)
        self._down = down
        for place, part in ((0, gate), (padded, up)):
            part.weight = nn.Parameter(self._first[place : place + inner], requires_grad=False)
            part.bias = nn.Parameter(self._first_bias[place : place + inner], requires_grad=False)
        down.weight = nn.Parameter(self._last[:, :inner], requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        inner = silu_and_mul(functional.linear(x, self._first, self._first_bias))
        return functional.linear(inner, self._last, self._down.bias)


def _mlps(visual: Any) -> list[Callable[[Tensor], Tensor]]:
    """The MLP of each block, in a faster form where there is one: [N, D] -> [N, D]."""
    mlps = [block.mlp for block in visual.blocks]
    is_gated = hasattr(mlps[0], "gate_proj") and visual.config.hidden_act == "silu"
    return [GatedInner(mlp) for mlp in mlps] if is_gated else mlps


class QwenTower:
    """Computes the features of one image at a time."""

    def __init__(self, visual: Any, sizes: TowerSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        """visual: the vision tower of transformers."""
        self._visual = visual
        self._sizes = sizes
        self._dtype = dtype
        self._device = device
        self._epsilon = torch.tensor(_EPSILON, dtype=torch.float32, device=device)
        self._mlps = _mlps(visual)
        self._last: tuple[Grid, _Layout] | None = None  # many images have the size of the one before

    def __call__(self, patches: Tensor, grid: Grid) -> list[Tensor]:
        """Patches [N, values] on the device -> features [M, X], and K times further features [M, X]."""
        layout, sizes = self._layout(grid), self._sizes
        embed = self._visual.patch_embed.proj  # a convolution whose windows do not overlap
        x = functional.linear(patches, embed.weight.flatten(1), embed.bias)
        if layout.corners is not None:
            places, weights = layout.corners
            x = x + (self._visual.pos_embed(places) * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if layout.order is not None:
            x = x.view(-1, sizes.merge**2, x.shape[-1])[layout.order].flatten(0, 1)
        further: list[Tensor] = []
        delta: Tensor | None = None
        for index, block in enumerate(self._visual.blocks):
            attention = layout.windows if sizes.window and index not in sizes.full_layers else layout.frames
            heads = block.attn.qkv(self._norm(block.norm1, x, delta)).view(len(x), -1, sizes.head_size)
            q, k, v = rotate_heads(heads, sizes.num_heads, layout.tables, None)
            delta = block.attn.proj(attention.attend(q, k, v, 0))
            delta = self._mlps[index](self._norm(block.norm2, x, delta))
            if index in sizes.deepstack:
                x, delta = x + delta, None
                further.append(self._visual.deepstack_merger_list[sizes.deepstack.index(index)](x))
        merged = self._visual.merger(x if delta is None else x + delta)
        return [merged if layout.inverse is None else merged[layout.inverse], *further]

    def _norm(self, norm: nn.Module, x: Tensor, delta: Tensor | None) -> Tensor:
        """The norm of x [N, D], to which delta [N, D] is added before, in place -> [N, D]."""
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        if not isinstance(norm, nn.LayerNorm):
            if delta is None:
                return rms_norm(x, weight, self._epsilon)
            return add_rms_norm(delta, x, weight, self._epsilon)
        if delta is None:
            return norm(x)
        return add_layer_norm(delta, x, weight=weight, bias=norm.bias, epsilon=norm.eps, keeps_sum=True)

    def _layout(self, grid: Grid) -> _Layout:
        if self._last is None or self._last[0] != grid:
            self._last = grid, self._new_layout(grid)
        return self._last[1]

    def _new_layout(self, grid: Grid) -> _Layout:
        sizes, frames = self._sizes, grid[0]
        rows, columns = patch_places(grid, sizes.merge)
        num_patches = len(rows) // frames
        order: Ints | None = None
        window_lengths = [num_patches] * frames
        if sizes.window:
            order, lengths = windows_of(grid, merge=sizes.merge, side=sizes.window)
            window_lengths = (lengths * sizes.merge**2).tolist()
        angles = self._angles(rows, columns)
        if order is not None:
            angles = angles.reshape(len(order), -1, angles.shape[-1])[order].reshape(angles.shape)
        cos, sin = np.cos(angles), np.sin(angles)
        has_learned = hasattr(self._visual, "pos_embed")
        return _Layout(
            tables=(self._upload(np.concatenate((cos, cos), -1)), self._upload(np.concatenate((-sin, sin), -1))),
            frames=self._attention([num_patches] * frames),
            windows=self._attention(window_lengths),
            order=None if order is None else self._upload(order),
            inverse=None if order is None else self._upload(np.argsort(order)),
            corners=self._corners(rows, columns, grid) if has_learned else None,
        )

    def _angles(self, rows: Ints, columns: Ints) -> Floats:
        """rows and columns [N] of the patches -> [N, 1, E / 2]: the first half turns by the row, the other by the
        column.
        """
        half = self._sizes.head_size // 2
        frequencies = 1.0 / (self._sizes.theta ** (np.arange(0, half, 2, dtype=np.float32) / half))
        both = np.stack((rows, columns), -1).astype(np.float32)[..., None] * frequencies.astype(np.float32)
        return both.reshape(len(rows), 1, half)

    def _corners(self, rows: Ints, columns: Ints, grid: Grid) -> tuple[Tensor, Tensor]:
        """Learned positions form a square; a patch at rows, columns [N] reads the 4 around its place in it: indices
        [N, 4], and weights [N, 4].
        """
        side = int(self._visual.pos_embed.weight.shape[0] ** 0.5)
        parts: list[tuple[Ints, Floats]] = []
        for places, size in ((rows, grid[1]), (columns, grid[2])):
            exact = places.astype(np.float32) * (side - 1) / max(size - 1, 1)
            low = np.floor(exact).astype(np.int64)
            share = (exact - low).astype(np.float32)
            parts.append((np.stack((low, np.minimum(low + 1, side - 1)), -1), np.stack((1 - share, share), -1)))
        (row_places, row_weights), (column_places, column_weights) = parts
        indices = row_places[:, :, None] * side + column_places[:, None, :]
        weights = row_weights[:, :, None] * column_weights[:, None, :]
        return self._upload(indices.reshape(-1, 4)), self._upload(weights.reshape(-1, 4))

    def _attention(self, lengths: list[int]) -> PackedAttention:
        """Attention within runs of patches of these lengths."""
        sizes, device = self._sizes, self._device
        shape = AttentionShape(
            num_layers=1,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_heads,
            head_size=sizes.head_size,
            scale=sizes.head_size**-0.5,
            is_causal=False,
        )
        nothing = torch.empty(kv_pool_shape(shape, num_pages=1, page_size=1), dtype=self._dtype, device=device)
        attention = PackedAttention(shape, nothing)
        none = torch.empty(0, dtype=torch.int64)
        attention.prepare(ForwardBatch(slot_mapping=none, page_table=none, query_lengths=lengths, kv_lengths=lengths))
        return attention

    def _upload(self, values: Ints | Floats) -> Tensor:
        """[...] on the device."""
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self._device)


def cut(values: Tensor, *, size: int, merge: int, frames: int) -> Tensor:
    """An image [C, height, width] -> its patches of ``size`` x ``size`` pixels [N, C * frames * size^2].

    Those of a token stand together; all ``frames`` of a patch are the image.
    """
    rows, columns = values.shape[1] // (size * merge), values.shape[2] // (size * merge)
    parts = values.view(-1, rows, merge, size, columns, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
    seen = parts.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return seen.reshape(rows * columns * merge**2, -1)


def patch_places(grid: Grid, merge: int) -> tuple[Ints, Ints]:
    """Row and column [N] of each patch. The patches of a token stand together."""
    frames, height, width = grid
    parts = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    rows, columns = parts.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return np.tile(rows, frames), np.tile(columns, frames)


def windows_of(grid: Grid, *, merge: int, side: int) -> tuple[Ints, Ints]:
    """The tokens of a grid by windows of ``side`` x ``side`` tokens: their order [M], and the tokens of each window."""
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = np.indices((frames, height, width)).reshape(3, -1)
    per_row = -(-width // side)
    window = (frame * -(-height // side) + row // side) * per_row + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)
