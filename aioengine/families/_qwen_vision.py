"""Qwen's models that read images: older files have the fields of the text model beside the vision tower's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta

from aioengine.families._config import DecoderConfig, decode_config, not_implemented
from aioengine.families._vision import VisionConfig, VisionFamily, vision_config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

RENAMED: Final = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
)
"""Files of transformers since version 4.52; older ones have the new names."""


class QwenFamily(VisionFamily, frozen=True, kw_only=True):
    """rope: the axes of the rotation, where the file names none. num_deepstack: as in ``VisionConfig``, likewise."""

    rope: ClassVar[dict[str, object]] = {"mrope_section": [16, 24, 24]}
    num_deepstack: ClassVar[int] = 0

    image_token_id: Annotated[int, Meta(ge=0)] = 151_655


def read_qwen(raw: Mapping[str, object], config_type: type[QwenFamily]) -> VisionConfig:
    """The text model, from config.json.

    Raises:
        ValueError: a value is missing or not implemented; it is named.
    """
    fields = dict(raw)
    text = fields.get("text_config")
    if text is None:
        text = {name: value for name, value in raw.items() if name not in ("vision_config", "architectures")}
        text["model_type"] = config_type.text_types[0]
    if not isinstance(text, dict):
        not_implemented("text_config", text, "an object")
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(name) or {}
    if not isinstance(rope, dict):
        not_implemented(name, rope, "an object")
    rope = {**config_type.rope, **rope}
    for kind in ("type", "rope_type"):
        if rope.get(kind) == "mrope":
            rope[kind] = "default"
    fields["text_config"] = {**text, name: rope}
    found = decode_config(fields, config_type)
    layers = found.vision_config.deepstack_visual_indexes
    decoder = found.text(raw)
    _check(decoder)
    return vision_config_of(
        decoder,
        image_token_id=found.image_token_id,
        towers=("visual.",),
        renamed=RENAMED,
        num_axes=3,
        num_deepstack=found.num_deepstack if layers is None else len(layers),
    )


def _check(decoder: DecoderConfig) -> None:
    rope = decoder.rope
    if rope.rope_type == "dynamic":
        not_implemented("rope_parameters.rope_type", rope.rope_type, "default, linear, yarn or llama3")
    found, num_pairs = list(rope.mrope_section), decoder.head_size // 2
    if len(found) != 3 or min(found) < 0 or sum(found) != num_pairs:
        not_implemented("rope_parameters.mrope_section", found, f"three numbers that add up to {num_pairs}")
