"""LLaVA 1.5: a CLIP or SigLIP tower, a two-layer projector, and a Llama, Mistral or Qwen2."""

from __future__ import annotations

from typing import ClassVar, Literal

from aioengine.families._vision import ImageToken, VisionFamily


class LlavaFamily(VisionFamily, frozen=True, kw_only=True):
    """LLaVA.

    Attributes:
        renamed: names before transformers 4.52, since 4.52, and since 5.
        default_placeholder_id: the placeholder token of files that do not name it.
    """

    text_types = ("llama", "mistral", "qwen2")
    tower_types = ("clip_vision_model", "siglip_vision_model")
    renamed = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("model.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.", "vision_tower."),
        ("vision_tower.vision_model.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    )
    default_placeholder_id: ClassVar[int] = 32_000

    image_token_index: ImageToken | None = None
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    vision_feature_layer: int | list[int] = -2

    @property
    def placeholder_id(self) -> int:
        token_id = self.image_token_index if self.image_token_id is None else self.image_token_id
        return self.default_placeholder_id if token_id is None else token_id


PLUGIN = LlavaFamily
