"""Decoder models that read images: our decoder, with vision tower and projector of transformers.

Shape letters: N image tokens, D hidden size, K DeepStack layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.initialization import no_init_weights

from aioengine import plugins
from aioengine.families._config import new_name
from aioengine.families._vision import VisionConfig
from aioengine.layers.layer import Target
from aioengine.models._base import InputSpec, ModelOptions
from aioengine.models._decoder import DecoderModel
from aioengine.protocol.media import RESIZE_BITS

_TEXT_PARTS = ("language_model", "text_model")


class ImageDecoder(DecoderModel):
    """Implements ``models._base.VisionModel``."""

    def __init__(self, raw: Mapping[str, object], options: ModelOptions) -> None:
        """Build the model. ``raw``: config.json."""
        config: VisionConfig = plugins.load("families", plugins.file_name(str(raw["model_type"]))).read(raw)
        super().__init__(config, options)
        self.input_spec = InputSpec(embeddings=True, position_axes=config.num_axes)
        self.image_token_id = config.image_token_id
        self.num_deepstack = config.num_deepstack
        self._towers_config = config
        self._tower = _tower(raw, options)

    def own_weights(self) -> dict[str, Target]:
        renamed = self._towers_config.renamed
        parameters = {f"model.{name}": parameter for name, parameter in self._tower.named_parameters()}
        return super().own_weights() | {
            new_name(name, renamed): Target(parameter.data) for name, parameter in parameters.items()
        }

    def is_ignored(self, name: str) -> bool:
        if name.startswith(self._towers_config.towers):
            return name.endswith("position_ids")  # a buffer in older files
        return super().is_ignored(name)

    @torch.inference_mode()
    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [N, (1 + K) * D], see ``VisionModel``."""
        try:
            output = self._tower.get_image_features(**self._inputs(arrays), return_dict=True)
        except (TypeError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"the vision tower cannot read an image of {shapes_of(arrays)}: {error}") from error
        features = [torch.cat(list(output.pooler_output))]
        if self.num_deepstack:
            features += [torch.cat(list(layer_features)) for layer_features in output.deepstack_features]
        return torch.cat([part.to(self.dtype) for part in features], -1)

    def _inputs(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move arrays [...] to the device and the model's dtype, resize pictures, and convert bytes to values."""
        inputs: dict[str, Tensor] = {}
        for name, array in arrays.items():
            on_device = to_device(array, self.device)  # first, since the GPU converts faster
            inputs[name] = on_device.to(self.dtype) if array.is_floating_point() else on_device
        if "picture" in inputs:
            inputs["pixels"] = resized(inputs, rows_first=bool(arrays["rows_first"]))
        if "pixels" in inputs and "table" in inputs:
            inputs["pixel_values"] = looked_up(inputs.pop("pixels"), inputs.pop("table"))
        return inputs

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Return pixels [1, 3, side, side]: all images have one size. See ``VisionModel``."""
        side = int(self._tower.config.vision_config.image_size)
        return {"pixels": torch.zeros(1, 3, side, side, dtype=torch.uint8), "table": torch.zeros(3, 256)}


def shapes_of(arrays: Mapping[str, Tensor]) -> str:
    """Return names and shapes of arrays [...], for error messages."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def to_device(array: Tensor, device: torch.device) -> Tensor:
    """Copy [...] to the device without synchronizing with a GPU."""
    if array.is_cuda or device.type != "cuda":
        return array.to(device)
    return (array if array.is_pinned() else array.pin_memory()).to(device, non_blocking=True)


def _tower(raw: Mapping[str, object], options: ModelOptions) -> Any:
    """Build the transformers model without its text model. The weights are uninitialized."""
    fields = {name: value for name, value in raw.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model(str(raw["model_type"]), **fields)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id, text.layer_types = 0, 1, None, []
    with no_init_weights(), options.device:
        model = AutoModel.from_config(config, dtype=options.dtype, attn_implementation="sdpa")
    for name in _TEXT_PARTS:
        if hasattr(model, name):
            delattr(model, name)
    return model.requires_grad_(False).eval()


def looked_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Look up bytes [..., C, H, W] in the table [C, 256]: -> values [..., C, H, W]."""
    channels = pixels.view(-1, len(table), pixels.shape[-2] * pixels.shape[-1])
    return table.expand(len(channels), -1, -1).gather(2, channels.long()).view(pixels.shape)


def resized(arrays: Mapping[str, Tensor], *, rows_first: bool) -> Tensor:
    """Resize ``picture`` [h, w, 3] -> [3, H, W].

    The passes are in ``row_starts`` [H], ``row_weights`` [H, K], ``column_starts`` [W] and ``column_weights`` [W, L].
    """
    pixels = arrays["picture"].permute(2, 0, 1)
    for name, dim in (("row", 1), ("column", 2)) if rows_first else (("column", 2), ("row", 1)):
        pixels = _summed(pixels, arrays[f"{name}_starts"], arrays[f"{name}_weights"], dim)
    return pixels.contiguous()


def _summed(pixels: Tensor, starts: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Run one pass along ``dim`` of [C, h, w]: sums of K neighbours from ``starts`` [N], with ``weights`` [N, K]."""
    shape = [*pixels.shape[:dim], len(starts), *pixels.shape[dim + 1 :]]
    total = starts.new_full(shape, 1 << (RESIZE_BITS - 1))  # for rounding
    offsets = torch.arange(weights.shape[1], device=starts.device, dtype=starts.dtype)
    indices = (starts + offsets.unsqueeze(1)).clamp_(max=pixels.shape[dim] - 1)
    column = (-1, 1) if dim == 1 else (-1,)
    for part, weight in zip(indices, weights.unbind(1), strict=True):
        total += pixels.index_select(dim, part).int().mul_(weight.view(column))
    return total.bitwise_right_shift_(RESIZE_BITS).clamp_(0, 255).byte()


class Gemma3(ImageDecoder):
    """Gemma 3. All images have one size."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, options)
        self.attention_shape = replace(self.attention_shape, has_bidirectional_images=True)

    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [N, D], see ``VisionModel``. ``num_crops`` is dropped: images are not cropped."""
        return super().encode_image({name: array for name, array in arrays.items() if name != "num_crops"})


MAX_TILES: Final = 64
"""Tiles of the largest image, for the memory measurement. Known processors create up to 26."""


class Idefics3(ImageDecoder):
    """Idefics3. Each tile has the same number of tokens."""

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Return pixels [1, tiles, 3, side, side] and their mask [1, tiles, side, side], see ``VisionModel``.

        The values are ones, since transformers drops tiles of zeros.
        """
        config = self._tower.config
        side = int(config.vision_config.image_size)
        num_tokens = (side // int(config.vision_config.patch_size)) ** 2 // int(config.scale_factor) ** 2
        num_tiles = min(max(max_tokens // max(num_tokens, 1), 1), MAX_TILES)
        return {
            "pixels": torch.zeros(1, num_tiles, 3, side, side, dtype=torch.uint8),
            "table": torch.ones(3, 256),
            "pixel_attention_mask": torch.ones(1, num_tiles, side, side, dtype=torch.int64),
        }
