"""Qwen's decoder models that read images: three-axis positions, and images of any aspect ratio.

Shape letters: M image tokens, X hidden size of the text model, K DeepStack layers, C channels, N patches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from aioengine.models._image_decoder import ImageDecoder, shapes_of
from aioengine.models._qwen_tower import QwenTower, TowerSizes, cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.models._base import ModelOptions


class QwenVision(ImageDecoder):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    def __init__(self, raw: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(raw, options)
        self._vision = self._tower.config.vision_config
        visual = self._tower.visual
        self._qwen_tower = QwenTower(visual, self._sizes(), dtype=options.dtype, device=options.device)

    def _sizes(self) -> TowerSizes:
        vision = self._vision
        size = getattr(vision, "embed_dim", vision.hidden_size)
        window = getattr(vision, "window_size", 0) // vision.spatial_merge_size // vision.patch_size
        return TowerSizes(
            num_heads=vision.num_heads,
            head_size=size // vision.num_heads,
            merge=vision.spatial_merge_size,
            theta=(getattr(vision, "rope_parameters", None) or {}).get("rope_theta", 10_000.0),
            window=window,
            full_layers=tuple(getattr(vision, "fullatt_block_indexes", ())),
            deepstack=tuple(getattr(vision, "deepstack_visual_indexes", ())),
        )

    @torch.inference_mode()
    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [M, (1 + K) * X], see ``VisionModel``."""
        grids = arrays.get("image_grid_thw")
        if grids is None or grids.shape != (1, 3):
            message = f"expected pixel_values and image_grid_thw of one image, got {shapes_of(arrays)}"
            raise ValueError(message)
        frames, height, width = grid = tuple(grids[0].tolist())
        vision, merge = self._vision, self._vision.spatial_merge_size
        values = self._values(arrays)
        pixels_shape = vision.in_channels, height * vision.patch_size, width * vision.patch_size
        is_whole = min(grid) > 0 and not (height % merge or width % merge)
        if is_whole and values.shape == pixels_shape:
            values = cut(values, size=vision.patch_size, merge=merge, frames=vision.temporal_patch_size)
        patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if not is_whole or values.shape != (frames * height * width, patch_values):
            message = f"pixel_values do not match image_grid_thw {grid}: {shapes_of(arrays)}"
            raise ValueError(message)
        return torch.cat(self._qwen_tower(values, (frames, height, width)), -1)

    def _values(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the image [C, height, width] or its patches [N, values]. Raises ValueError for other arrays."""
        pixel_arrays = {name: array for name, array in arrays.items() if name != "image_grid_thw"}
        try:
            return self._inputs(pixel_arrays)["pixel_values"]
        except (KeyError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            message = f"invalid pixel_values of one image: {shapes_of(arrays)}: {error}"
            raise ValueError(message) from error

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
