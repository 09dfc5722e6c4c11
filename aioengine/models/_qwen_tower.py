"""Qwen's vision towers: the modules of transformers, in one pass over the packed patches of an image.

transformers loops over windows in Python, and synchronizes with the device for the grid sizes. This file computes the
data of a grid on the host, once per grid, and uses the packed attention of encoders.

Shape letters: N patches, M image tokens (N / merge^2), H heads, E head size, D hidden size of the tower, X hidden size
of the text model, K DeepStack layers, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from aioengine.attention._base import AttentionShape, ForwardBatch, kv_pool_shape
from aioengine.attention.packed import PackedAttention
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.arrays import Ints64
from aioengine.kernels.heads import RotaryTables, rotate_heads
from aioengine.kernels.norms import add_layer_norm, add_rms_norm, rms_norm
from aioengine.models._base import ModelOptions
from aioengine.models._image_decoder import ImageDecoder, shapes_of, to_device

Floats = npt.NDArray[np.float32]

_EPSILON = 1e-6
"""Epsilon of the norms."""

_ALIGNMENT = 64

Grid = tuple[int, int, int]
"""(frames, height, width) in patches."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The data of a grid that the layers read.

    Attributes:
        frames, windows: attention within frames, and within windows.
        order: [M] the tokens ordered by window; None without windows. inverse: [M] the inverse permutation.
        corners: indices [N, 4] and weights [N, 4] to interpolate learned positions; None without learned positions.
    """

    tables: RotaryTables
    frames: PackedAttention
    windows: PackedAttention
    order: Tensor | None
    inverse: Tensor | None
    corners: tuple[Tensor, Tensor] | None


class GatedInner:
    """down(silu(gate(x)) * up(x)): [N, D] -> [N, D]. Gate and up are one matmul.

    The inner size is padded with zeros to a multiple of ``_ALIGNMENT``. Qwen2.5-VL has 3,420, which is no multiple of
    8, and matmuls of such sizes take three times as long. The module's parameters become views of the padded tensors.
    """

    def __init__(self, mlp: Any) -> None:
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        inner, size = gate.weight.shape
        padded = -(-inner // _ALIGNMENT) * _ALIGNMENT
        self._first = gate.weight.new_zeros(2 * padded, size)
        self._first_bias = gate.weight.new_zeros(2 * padded)
        self._last = down.weight.new_zeros(down.weight.shape[0], padded)
        self._down = down
        for start, part in ((0, gate), (padded, up)):
            part.weight = nn.Parameter(self._first[start : start + inner], requires_grad=False)
            part.bias = nn.Parameter(self._first_bias[start : start + inner], requires_grad=False)
        down.weight = nn.Parameter(self._last[:, :inner], requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        inner = activate_and_mul(functional.linear(x, self._first, self._first_bias), "silu")
        return functional.linear(inner, self._last, self._down.bias)


def _mlps(visual: Any) -> list[Callable[[Tensor], Tensor]]:
    """Return the MLPs of the blocks, replaced by a faster form if they are gated: [N, D] -> [N, D]."""
    mlps = [block.mlp for block in visual.blocks]
    is_gated = hasattr(mlps[0], "gate_proj") and visual.config.hidden_act == "silu"
    return [GatedInner(mlp) for mlp in mlps] if is_gated else mlps


class QwenTower:
    """Computes the features of one image at a time."""

    def __init__(self, visual: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        """Wrap the vision tower of transformers, ``visual``."""
        self._visual = visual
        config = visual.config
        self._num_heads, self._merge = config.num_heads, config.spatial_merge_size
        self._head_size = getattr(config, "embed_dim", config.hidden_size) // config.num_heads
        self._theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
        # the side of an attention window in tokens; 0 if all layers attend to whole frames
        self._window = getattr(config, "window_size", 0) // config.spatial_merge_size // config.patch_size
        self._full_layers = tuple(getattr(config, "fullatt_block_indexes", ()))  # in a tower with windows
        self._deepstack = tuple(getattr(config, "deepstack_visual_indexes", ()))
        self._dtype = dtype
        self._device = device
        self._epsilon = torch.tensor(_EPSILON, dtype=torch.float32, device=device)
        self._mlps = _mlps(visual)
        self._layout = lru_cache(1)(self._new_layout)  # consecutive images often have one size

    def __call__(self, patches: Tensor, grid: Grid) -> list[Tensor]:
        """Patches [N, values] on the device -> features [M, X], followed by K further features [M, X]."""
        layout = self._layout(grid)
        embed = self._visual.patch_embed.proj  # a convolution without overlap
        x = functional.linear(patches, embed.weight.flatten(1), embed.bias)
        if layout.corners is not None:
            indices, weights = layout.corners
            x = x + (self._visual.pos_embed(indices) * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if layout.order is not None:
            x = x.view(-1, self._merge**2, x.shape[-1])[layout.order].flatten(0, 1)
        further: list[Tensor] = []
        delta: Tensor | None = None
        for index, block in enumerate(self._visual.blocks):
            attention = layout.windows if self._window and index not in self._full_layers else layout.frames
            heads = block.attn.qkv(self._norm(block.norm1, x, delta)).view(len(x), -1, self._head_size)
            q, k, v = rotate_heads(heads, self._num_heads, layout.tables)
            delta = block.attn.proj(attention.attend(q, k, v, 0))
            delta = self._mlps[index](self._norm(block.norm2, x, delta))
            if index in self._deepstack:
                x, delta = x + delta, None
                further.append(self._visual.deepstack_merger_list[self._deepstack.index(index)](x))
        merged = self._visual.merger(x if delta is None else x + delta)
        return [merged if layout.inverse is None else merged[layout.inverse], *further]

    def _norm(self, norm: nn.Module, x: Tensor, delta: Tensor | None) -> Tensor:
        """Add delta [N, D] to x [N, D] in place, and return the norm of x: [N, D]."""
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        if not isinstance(norm, nn.LayerNorm):
            if delta is None:
                return rms_norm(x, weight, self._epsilon)
            return add_rms_norm(delta, x, weight, self._epsilon)
        if delta is None:
            return norm(x)
        return add_layer_norm(delta, x, weight=weight, bias=norm.bias, epsilon=norm.eps, keeps_sum=True)

    def _new_layout(self, grid: Grid) -> _Layout:
        frames = grid[0]
        rows, columns = patch_positions(grid, self._merge)
        num_patches = len(rows) // frames
        order: Ints64 | None = None
        window_lengths = [num_patches] * frames
        if self._window:
            order, lengths = windows_of(grid, merge=self._merge, side=self._window)
            window_lengths = (lengths * self._merge**2).tolist()
        angles = self._angles(rows, columns)
        if order is not None:
            angles = angles.reshape(len(order), -1, angles.shape[-1])[order].reshape(angles.shape)
        has_learned = hasattr(self._visual, "pos_embed")
        return _Layout(
            tables=RotaryTables(self._upload(np.concatenate((np.cos(angles), np.sin(angles)), 1))),
            frames=self._attention([num_patches] * frames),
            windows=self._attention(window_lengths),
            order=None if order is None else self._upload(order),
            inverse=None if order is None else self._upload(np.argsort(order)),
            corners=self._corners(rows, columns, grid) if has_learned else None,
        )

    def _angles(self, rows: Ints64, columns: Ints64) -> Floats:
        """rows and columns [N] of patches -> angles [N, 1, E / 2]: first half by row, second half by column."""
        half = self._head_size // 2
        frequencies = 1.0 / (self._theta ** (np.arange(0, half, 2, dtype=np.float32) / half))
        angles = np.stack((rows, columns), -1).astype(np.float32)[..., None] * frequencies.astype(np.float32)
        return angles.reshape(len(rows), 1, half)

    def _corners(self, rows: Ints64, columns: Ints64, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return the indices [N, 4] and weights [N, 4] of a bilinear interpolation in the square of learned positions.

        ``rows`` and ``columns`` [N]: of the patches.
        """
        side = int(self._visual.pos_embed.weight.shape[0] ** 0.5)
        parts: list[tuple[Ints64, Floats]] = []
        for positions, size in ((rows, grid[1]), (columns, grid[2])):
            exact = positions.astype(np.float32) * (side - 1) / max(size - 1, 1)
            low = np.floor(exact).astype(np.int64)
            fraction = (exact - low).astype(np.float32)
            parts.append((np.stack((low, np.minimum(low + 1, side - 1)), -1), np.stack((1 - fraction, fraction), -1)))
        (row_indices, row_weights), (column_indices, column_weights) = parts
        indices = row_indices[:, :, None] * side + column_indices[:, None, :]
        weights = row_weights[:, :, None] * column_weights[:, None, :]
        return self._upload(indices.reshape(-1, 4)), self._upload(weights.reshape(-1, 4))

    def _attention(self, lengths: list[int]) -> PackedAttention:
        """Return attention within consecutive runs of patches of these lengths."""
        shape = AttentionShape(
            num_layers=1,
            num_heads=self._num_heads,
            num_kv_heads=self._num_heads,
            head_size=self._head_size,
            scale=self._head_size**-0.5,
            is_causal=False,
        )
        unused_pool = torch.empty(
            kv_pool_shape(shape, num_pages=1, page_size=1), dtype=self._dtype, device=self._device
        )
        attention = PackedAttention(shape, unused_pool)
        empty = torch.empty(0, dtype=torch.int64)
        attention.prepare(ForwardBatch(slot_mapping=empty, page_table=empty, query_lengths=lengths, kv_lengths=lengths))
        return attention

    def _upload(self, values: Ints64 | Floats) -> Tensor:
        """Copy an array [...] to the device."""
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self._device)


def cut(values: Tensor, *, size: int, merge: int, frames: int) -> Tensor:
    """Cut an image [C, height, width] into patches of ``size`` x ``size`` pixels: [N, C * frames * size^2].

    The patches of a token are contiguous. All ``frames`` of a patch repeat the image.
    """
    rows, columns = values.shape[1] // (size * merge), values.shape[2] // (size * merge)
    parts = values.view(-1, rows, merge, size, columns, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
    repeated = parts.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return repeated.reshape(rows * columns * merge**2, -1)


def patch_positions(grid: Grid, merge: int) -> tuple[Ints64, Ints64]:
    """Return row and column [N] of each patch. The patches of a token are contiguous."""
    frames, height, width = grid
    parts = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    rows, columns = parts.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return np.tile(rows, frames), np.tile(columns, frames)


def windows_of(grid: Grid, *, merge: int, side: int) -> tuple[Ints64, Ints64]:
    """Return the tokens ordered by windows of ``side`` x ``side`` tokens, [M], and the number of tokens per window."""
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = np.indices((frames, height, width)).reshape(3, -1)
    per_row = -(-width // side)
    window = (frame * -(-height // side) + row // side) * per_row + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


class QwenVision(ImageDecoder):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    def __init__(self, raw: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(raw, options)
        self._vision = self._tower.config.vision_config
        visual = self._tower.visual
        self._qwen_tower = QwenTower(visual, dtype=options.dtype, device=options.device)

    @torch.inference_mode()
    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [M, (1 + K) * X], see ``VisionModel``."""
        grids = arrays.get("image_grid_thw")
        if grids is None or grids.shape != (1, 3):
            raise ValueError(f"expected pixel_values and image_grid_thw of one image, got {shapes_of(arrays)}")
        frames, height, width = grid = tuple(grids[0].tolist())
        vision, merge = self._vision, self._vision.spatial_merge_size
        values = self._values(arrays)
        pixels_shape = vision.in_channels, height * vision.patch_size, width * vision.patch_size
        is_whole = min(grid) > 0 and not (height % merge or width % merge)
        if is_whole and values.shape == pixels_shape:
            values = cut(values, size=vision.patch_size, merge=merge, frames=vision.temporal_patch_size)
        patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if not is_whole or values.shape != (frames * height * width, patch_values):
            raise ValueError(f"pixel_values do not match image_grid_thw {grid}: {shapes_of(arrays)}")
        return torch.cat(self._qwen_tower(values, (frames, height, width)), -1)

    def _values(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the image [C, height, width] or its patches [N, values]. Raises ValueError for other arrays."""
        pixel_arrays = {name: array for name, array in arrays.items() if name != "image_grid_thw"}
        try:
            return self._inputs(pixel_arrays)["pixel_values"]
        except (KeyError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"invalid pixel_values of one image: {shapes_of(arrays)}: {error}") from error

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Return a square image, to be resized from a picture [height, width, 3] with four times its pixels."""
        vision = self._vision
        side = max(math.isqrt(max_tokens), 1) * vision.spatial_merge_size
        size = side * vision.patch_size
        starts, weights = torch.zeros(size, dtype=torch.int32), torch.zeros(size, 8, dtype=torch.int32)
        return {
            "picture": torch.zeros(2 * size, 2 * size, 3, dtype=torch.uint8),
            "row_starts": starts,
            "row_weights": weights,
            "column_starts": starts,
            "column_weights": weights,
            "rows_first": torch.tensor([False]),
            "table": torch.zeros(vision.in_channels, 256),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
