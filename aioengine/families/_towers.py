"""How many numbers the vision towers have, with what brings their features to the text model, from config.json alone.

As transformers makes them; D size of the tower, I inner size of its MLP, T size of the text model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from aioengine.families._fields import not_implemented

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
"""They are made one by one before the weights are looked at."""


class _Vit(msgspec.Struct, frozen=True):
    """CLIP and SigLIP towers, also that of Idefics3."""

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
    def num_places(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class _Qwen(msgspec.Struct, frozen=True):
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
        """The MLP that merges the features of neighbours; its norm is not counted."""
        inner = size * self.spatial_merge_size**2
        return inner * inner + inner + inner * outputs + outputs


class _Whole(msgspec.Struct, frozen=True):
    """The fields beside ``vision_config``."""

    scale_factor: Size = 2
    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -2


def num_tower_parameters(config: Mapping[str, object], text_size: int) -> int:
    """Of the tower and of what follows it, of the model that ``config`` (config.json) describes. ``text_size``: T.

    As all sizes are checked for it, ``model_folder`` calls it for the check alone, too.

    Raises:
        ValueError: a field has a value that no tower has.
    """
    vision = config.get("vision_config")
    fields = vision if isinstance(vision, dict) else {}
    model_type = str(config.get("model_type"))
    try:
        whole = msgspec.convert(config, _Whole)
        return _COUNTS[model_type](fields, whole, text_size)
    except msgspec.ValidationError as error:
        not_implemented("vision_config", str(error), "numbers, as transformers has them")


def _check_heads(size: int, num_heads: int) -> None:
    """Raise ValidationError if the heads do not divide the size of the tower."""
    if size % num_heads:
        raise msgspec.ValidationError(f"{num_heads} heads of a tower of size {size}")


def _layer(size: int, inner: int) -> int:
    """One with biases and two layer norms."""
    return 4 * (size * size + size) + 4 * size + 2 * size * inner + inner + size


def _llava(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    is_clip = fields.get("model_type") == "clip_vision_model"
    tower = msgspec.convert({"patch_size": 32 if is_clip else 16, **fields}, _Vit)
    layers = whole.vision_feature_layer
    inputs = tower.hidden_size * (len(layers) if isinstance(layers, list) else 1)
    biases = 2 * text_size * whole.multimodal_projector_bias
    return (_clip(tower) if is_clip else _siglip(tower)) + inputs * text_size + text_size**2 + biases


def _gemma3(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    tower = msgspec.convert({"patch_size": 16, **fields}, _Vit)
    return _siglip(tower) + tower.hidden_size * (text_size + 1)


def _idefics3(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    defaults = {"hidden_size": 1152, "num_attention_heads": 16}
    tower = msgspec.convert({**defaults, **fields, "vision_use_head": False}, _Vit)
    return _siglip(tower) + tower.hidden_size * whole.scale_factor**2 * text_size


def _clip(tower: _Vit) -> int:
    """Its two norms, its class token and the place of that stand beside the patches."""
    return tower.encoder + tower.patches + (tower.num_places + 6) * tower.hidden_size


def _siglip(tower: _Vit) -> int:
    size = tower.hidden_size
    attention = 4 * (size * size + size)
    head = size + attention + 2 * size + 2 * size * tower.intermediate_size + tower.intermediate_size + size
    return tower.encoder + tower.patches + (tower.num_places + 3) * size + head * tower.vision_use_head


def _qwen2_vl(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    tower = msgspec.convert(fields, _Qwen)
    size = tower.embed_dim
    _check_heads(size, tower.num_heads)
    blocks = tower.depth * _layer(size, size * tower.mlp_ratio)
    return tower.patches(size) + blocks + tower.merger(size, tower.hidden_size) + 2 * size


def _qwen2_5_vl(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    tower = msgspec.convert(fields, _Qwen)
    size, inner = tower.hidden_size, tower.intermediate_size
    _check_heads(size, tower.num_heads)
    block = 4 * (size * size + size) + 2 * size + 3 * size * inner + 2 * inner + size
    return tower.patches(size) + tower.depth * block + tower.merger(size, tower.out_hidden_size) + size


def _qwen3_vl(fields: dict[str, object], whole: _Whole, text_size: int) -> int:
    defaults = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    tower = msgspec.convert({**defaults, **fields}, _Qwen)
    size = tower.hidden_size
    _check_heads(size, tower.num_heads)
    merger, merged = tower.merger(size, tower.out_hidden_size), tower.spatial_merge_size**2
    deepstack = len(tower.deepstack_visual_indexes) * (merger + 2 * merged * size)
    blocks = tower.depth * _layer(size, tower.intermediate_size)
    return tower.patches(size) + size * (1 + tower.num_position_embeddings) + blocks + merger + 2 * size + deepstack


_COUNTS: Final[dict[str, Callable[[dict[str, object], _Whole, int], int]]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}
