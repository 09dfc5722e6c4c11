"""A text model that reads images: our decoder, with a vision tower of transformers.

The tower, and what brings its outputs to the size of the text model, is the model class of transformers without its
text model. N tokens of an image with features, D model size, K layers behind which further features are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedConfig

    from aioengine.families._vision import VisionConfig
    from aioengine.models._base import ModelOptions

_TEXT_PARTS = ("language_model", "text_model")


class ImageDecoder(DecoderModel):
    """See ``models._base.Model`` and ``models._base.VisionModel``."""

    def __init__(self, raw: Mapping[str, object], options: ModelOptions) -> None:
        """raw: config.json, which the family of its ``model_type`` reads."""
        config: VisionConfig = plugins.load("families", plugins.file_name(str(raw["model_type"]))).read(raw)
        super().__init__(config, options)
        self.input_spec = InputSpec(embeddings=True, position_axes=config.num_axes)
        self.image_token_id = config.image_token_id
        self.num_deepstack = config.num_deepstack
        self._towers_config = config
        self._device = options.device
        self._tower = _tower(raw, options)

    def tensors(self) -> dict[str, Target]:
        renamed = self._towers_config.renamed
        parameters = {f"model.{name}": parameter for name, parameter in self._tower.named_parameters()}
        return super().tensors() | {new_name(name, renamed): Target(found.data) for name, found in parameters.items()}

    def is_ignored(self, name: str) -> bool:
        if name.startswith(self._towers_config.towers):
            return name.endswith("position_ids")  # a buffer in old files
        return super().is_ignored(name)

    @torch.inference_mode()
    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """See ``VisionModel``: [N, (1 + K) * D]."""
        try:
            found = self._tower.get_image_features(**self._inputs(arrays), return_dict=True)
        except (TypeError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            message = f"the vision tower cannot read an image of {shapes_of(arrays)}: {error}"
            raise ValueError(message) from error
        features = [torch.cat(list(found.pooler_output))]
        if self.num_deepstack:
            features += [torch.cat(list(each)) for each in found.deepstack_features]
        return torch.cat([each.to(self.dtype) for each in features], -1)

    def _inputs(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arrays [...] on the device, numbers in the dtype of the model, values in place of bytes."""
        found: dict[str, Tensor] = {}
        for name, array in arrays.items():
            on_device = to_device(array, self._device)  # before the conversion, which a GPU does faster
            found[name] = on_device.to(self.dtype) if array.is_floating_point() else on_device
        if "picture" in found:
            found["pixels"] = resized(found, rows_first=bool(arrays["rows_first"]))
        if "pixels" in found and "table" in found:
            found["pixel_values"] = looked_up(found.pop("pixels"), found.pop("table"))
        return found

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """See ``VisionModel``: pixels [1, 3, side, side], since every image has one size."""
        side = int(self._tower.config.vision_config.image_size)
        return {"pixels": torch.zeros(1, 3, side, side, dtype=torch.uint8), "table": torch.zeros(3, 256)}


def shapes_of(arrays: Mapping[str, Tensor]) -> str:
    """The names and shapes of arrays [...], for messages."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def to_device(array: Tensor, device: torch.device) -> Tensor:
    """[...] -> [...] on the device, without waiting for earlier steps of a GPU."""
    if array.is_cuda or device.type != "cuda":
        return array.to(device)
    return (array if array.is_pinned() else array.pin_memory()).to(device, non_blocking=True)


class _Tower(Protocol):
    """A model of transformers, as far as it is used."""

    config: PreTrainedConfig
    visual: Any

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values [...] of each weight."""
        ...

    def get_image_features(self, **arrays: object) -> Any: ...


def _tower(raw: Mapping[str, object], options: ModelOptions) -> _Tower:
    """The model of transformers without its text model, with memory for its weights and nothing in it."""
    fields = {name: value for name, value in raw.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model(str(raw["model_type"]), **fields)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id, text.layer_types = 0, 1, None, []
    with no_init_weights(), options.device:
        model = AutoModel.from_config(config, dtype=options.dtype, attn_implementation="sdpa")
    for name in _TEXT_PARTS:
        if hasattr(model, name):
            delattr(model, name)
    tower: _Tower = model.requires_grad_(False).eval()
    return tower
