"""Qwen's models that read images: positions of three axes, and towers that keep the proportions of an image.

M tokens of an image, X size of the text model, K layers with further features.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from aioengine.models._image_decoder import ImageDecoder, shapes_of
from aioengine.models._qwen_tower import QwenTower, TowerSizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.families._vision import VisionConfig
    from aioengine.models._base import ModelOptions


class QwenVision(ImageDecoder):
    """See ``ImageDecoder``."""

    def __init__(self, raw: Mapping[str, object], config: VisionConfig, options: ModelOptions) -> None:
        super().__init__(raw, config, options)
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
        """See ``VisionModel``: [M, (1 + K) * X]."""
        patches, grids = arrays.get("pixel_values"), arrays.get("image_grid_thw")
        if patches is None or grids is None or grids.shape != (1, 3) or patches.dim() != 2:
            message = f"pixel_values and image_grid_thw of one image are needed, not {shapes_of(arrays)}"
            raise ValueError(message)
        frames, height, width = grid = tuple(grids[0].tolist())
        merge, patch_values = self._vision.spatial_merge_size, self._patch_values()
        is_whole = min(grid) > 0 and not (height % merge or width % merge)
        if not is_whole or patches.shape != (frames * height * width, patch_values):
            message = f"pixel_values and image_grid_thw do not fit: {shapes_of(arrays)}, a grid of {grid}"
            raise ValueError(message)
        return torch.cat(self._qwen_tower(self._on_device(patches), (frames, height, width)), -1)

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """See ``VisionModel``: a square; pixels [N, values] and its grid [1, 3]."""
        side = max(math.isqrt(max_tokens), 1) * self._vision.spatial_merge_size
        return {
            "pixel_values": torch.zeros(side * side, self._patch_values()),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }

    def _patch_values(self) -> int:
        vision = self._vision
        return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
