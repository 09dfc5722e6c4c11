"""Numbers of parameters of the vision towers of transformers and their projectors, computed from config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from aioengine.families._fields import not_implemented

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
"""Limited because transformers builds each layer before any weight is checked."""


class _VitFields(msgspec.Struct, frozen=True):
    """``vision_config`` of CLIP and SigLIP towers, including Idefics3's."""

    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 12
    num_channels: Size = 3
    image_size: Size = 224
    patch_size: Size = 32
    vision_use_head: bool = True

    def __post_init__(self) -> None:
        _check_heads(self.hidden_size, self.num_attention_heads)

    @property
    def encoder(self) -> int:
        return self.num_hidden_layers * _layer(self.hidden_size, self.intermediate_size)

    @property
    def patches(self) -> int:
        return self.num_channels * self.patch_size**2 * self.hidden_size

    @property
    def num_positions(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class _QwenTowerFields(msgspec.Struct, frozen=True):
    """``vision_config`` of Qwen's towers."""

    depth: Layers = 32
    num_heads: Size = 16
    embed_dim: Size = 1280
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    mlp_ratio: Size = 4
    in_channels: Size = 3
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    out_hidden_size: Size = 3584
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def patches(self, size: int) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2 * size

    def merger(self, size: int, outputs: int) -> int:
        """Count the MLP that merges the features of neighbouring patches, without its norm."""
        inner = size * self.spatial_merge_size**2
        return inner * inner + inner + inner * outputs + outputs


class _ModelFields(msgspec.Struct, frozen=True):
    """The fields of config.json outside ``vision_config``."""

    scale_factor: Size = 2
    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -2


def num_tower_parameters(config: Mapping[str, object], text_size: int) -> int:
    """Return the number of parameters of the vision tower and the projector.

    ``model_folder`` also calls this function to check the sizes.

    Args:
        config: config.json.
        text_size: hidden size of the text model.

    Raises ValueError if a field has an invalid value.
    """
    vision = config.get("vision_config")
    fields = vision if isinstance(vision, dict) else {}
    model_type = str(config.get("model_type"))
    try:
        model = msgspec.convert(config, _ModelFields)
        return _COUNTS[model_type](fields, model, text_size)
    except msgspec.ValidationError as error:
        not_implemented("vision_config", str(error), "the sizes of a model that transformers can build")


def _check_heads(size: int, num_heads: int) -> None:
    """Raise ValidationError if the number of heads does not divide the hidden size."""
    if size % num_heads:
        raise msgspec.ValidationError(f"hidden size {size} is not divisible by {num_heads} heads")


def _layer(size: int, inner: int) -> int:
    """Count a transformer layer with biases and two layer norms."""
    return 4 * (size * size + size) + 4 * size + 2 * size * inner + inner + size


def _llava(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    is_clip = fields.get("model_type") == "clip_vision_model"
    tower = msgspec.convert({"patch_size": 32 if is_clip else 16, **fields}, _VitFields)
    layers = model.vision_feature_layer
    inputs = tower.hidden_size * (len(layers) if isinstance(layers, list) else 1)
    biases = 2 * text_size * model.multimodal_projector_bias
    return (_clip(tower) if is_clip else _siglip(tower)) + inputs * text_size + text_size**2 + biases


def _gemma3(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    tower = msgspec.convert({"patch_size": 16, **fields}, _VitFields)
    return _siglip(tower) + tower.hidden_size * (text_size + 1)


def _idefics3(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    defaults = {"hidden_size": 1152, "num_attention_heads": 16}
    tower = msgspec.convert({**defaults, **fields, "vision_use_head": False}, _VitFields)
    return _siglip(tower) + tower.hidden_size * model.scale_factor**2 * text_size


def _clip(tower: _VitFields) -> int:
    """Count a CLIP tower. Beside the patches it has two norms, a class token and its position."""
    return tower.encoder + tower.patches + (tower.num_positions + 6) * tower.hidden_size


def _siglip(tower: _VitFields) -> int:
    size = tower.hidden_size
    attention = 4 * (size * size + size)
    head = size + attention + 2 * size + 2 * size * tower.intermediate_size + tower.intermediate_size + size
    return tower.encoder + tower.patches + (tower.num_positions + 3) * size + head * tower.vision_use_head


def _qwen2_vl(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    tower = msgspec.convert(fields, _QwenTowerFields)
    size = tower.embed_dim
    _check_heads(size, tower.num_heads)
    blocks = tower.depth * _layer(size, size * tower.mlp_ratio)
    return tower.patches(size) + blocks + tower.merger(size, tower.hidden_size) + 2 * size


def _qwen2_5_vl(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    tower = msgspec.convert(fields, _QwenTowerFields)
    size, inner = tower.hidden_size, tower.intermediate_size
    _check_heads(size, tower.num_heads)
    block = 4 * (size * size + size) + 2 * size + 3 * size * inner + 2 * inner + size
    return tower.patches(size) + tower.depth * block + tower.merger(size, tower.out_hidden_size) + size


def _qwen3_vl(fields: dict[str, object], model: _ModelFields, text_size: int) -> int:
    defaults = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    tower = msgspec.convert({**defaults, **fields}, _QwenTowerFields)
    size = tower.hidden_size
    _check_heads(size, tower.num_heads)
    merger, merged = tower.merger(size, tower.out_hidden_size), tower.spatial_merge_size**2
    deepstack = len(tower.deepstack_visual_indexes) * (merger + 2 * merged * size)
    blocks = tower.depth * _layer(size, tower.intermediate_size)
    return tower.patches(size) + size * (1 + tower.num_position_embeddings) + blocks + merger + 2 * size + deepstack


_COUNTS: Final[dict[str, Callable[[dict[str, object], _ModelFields, int], int]]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
