"""Decoder models that read images: our decoder, with vision tower and projector of transformers.

Shape letters: N image tokens, D hidden size, K DeepStack layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModel
from transformers.initialization import no_init_weights

from aioengine import plugins
from aioengine.layers.placement import Target
from aioengine.model_files.checkpoint import new_name
from aioengine.models._base import InputSpec
from aioengine.models._decoder import DecoderModel
from aioengine.models._image_pixels import looked_up, resized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.families._vision import VisionConfig
    from aioengine.models._base import ModelOptions

_TEXT_PARTS = ("language_model", "text_model")


class ImageDecoder(DecoderModel):
    """Implements ``models._base.Model`` and ``models._base.VisionModel``."""

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
            message = f"the vision tower cannot read an image of {shapes_of(arrays)}: {error}"
            raise ValueError(message) from error
        features = [torch.cat(list(output.pooler_output))]
        if self.num_deepstack:
            features += [torch.cat(list(layer_features)) for layer_features in output.deepstack_features]
        return torch.cat([part.to(self.dtype) for part in features], -1)

    def _inputs(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move arrays [...] to the device and the model's dtype, resize pictures, and convert bytes to values."""
        inputs: dict[str, Tensor] = {}
        for name, array in arrays.items():
            on_device = to_device(array, self._device)  # first, since the GPU converts faster
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
