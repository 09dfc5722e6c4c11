"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a text model with three-axis positions, and a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from aioengine.families._config import DecoderConfig
from aioengine.families._fields import not_implemented
from aioengine.families._vision import ImageToken, VisionFamily


class QwenFamily(VisionFamily, frozen=True, kw_only=True):
    """The base class of Qwen's families with images.

    Attributes:
        rope: default of the fields of the three axes in ``rope_parameters``.
        num_deepstack: default of ``VisionConfig.num_deepstack``.
        renamed: names since transformers 4.52. Older files have our names.
    """

    rope: ClassVar[dict[str, object]] = {"mrope_section": [16, 24, 24]}
    num_deepstack: ClassVar[int] = 0
    text_family = "qwen2"
    towers = ("visual.",)
    renamed = (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
    )

    image_token_id: ImageToken = 151_655

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. In older files the fields of the text model are not in ``text_config``."""
        text = config.get("text_config")
        if text is None:
            text = {name: value for name, value in config.items() if name not in ("vision_config", "architectures")}
            text["model_type"] = cls.text_types[0]
        if not isinstance(text, dict):
            not_implemented("text_config", text, "an object")
        name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
        rope = text.get(name) or {}
        if not isinstance(rope, dict):
            not_implemented(name, rope, "an object")
        rope = {**cls.rope, **rope}
        for kind in ("type", "rope_type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
        return super().read({**config, "text_config": {**text, name: rope}})

    def decoder(self) -> DecoderConfig:
        text, layers = self.text(), self.vision_config.deepstack_visual_indexes
        rope, num_pairs = text.rope, text.head_size // 2
        if rope.rope_type == "dynamic":
            not_implemented("rope_parameters.rope_type", rope.rope_type, "default, linear, yarn or llama3")
        section = list(rope.mrope_section)
        if len(section) != 3 or min(section) < 0 or sum(section) != num_pairs:
            limit = f"three numbers that add up to {num_pairs}"
            not_implemented("rope_parameters.mrope_section", section, limit)
        num_deepstack = self.num_deepstack if layers is None else len(layers)
        return self.with_images(text, num_axes=3, num_deepstack=num_deepstack)


class Qwen2VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen2-VL: the text model is a Qwen2 with three-axis positions."""

    text_types = ("qwen2_vl_text",)
    tower_types = ("", "qwen2_vl", "qwen2_vl_vision")


class Qwen25VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen2.5-VL: the text model is a Qwen2 with three-axis positions."""

    text_types = ("qwen2_5_vl_text",)
    tower_types = ("", "qwen2_5_vl", "qwen2_5_vl_vision")


class Qwen3VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen3-VL, dense: the text model is a Qwen3 with three-axis positions, interleaved in each head."""

    rope: ClassVar[dict[str, object]] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    num_deepstack: ClassVar[int] = 3
    text_family = "qwen3"
    text_types = ("qwen3_vl_text",)
    tower_types = ("", "qwen3_vl", "qwen3_vl_vision")
