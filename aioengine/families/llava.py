"""LLaVA 1.5: a CLIP or SigLIP tower, a projector of two layers, and a Llama, Mistral or Qwen2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from aioengine.families._config import decode_config
from aioengine.families._vision import VisionFamily, vision_config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._vision import VisionConfig

RENAMED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Files of transformers before version 4.52, of later ones, and of version 5."""


class Config(VisionFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    tower_types: ClassVar[tuple[str, ...]] = ("clip_vision_model", "siglip_vision_model")

    image_token_index: Annotated[int, Meta(ge=0)] | None = None
    image_token_id: Annotated[int, Meta(ge=0)] | None = None
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    vision_feature_layer: int | list[int] = -2


def read(config: Mapping[str, object]) -> VisionConfig:
    found = decode_config(config, Config)
    image_token_id = found.image_token_index if found.image_token_id is None else found.image_token_id
    return vision_config_of(
        found.text(config),
        image_token_id=32_000 if image_token_id is None else image_token_id,
        towers=("vision_tower.", "multi_modal_projector."),
        renamed=RENAMED,
    )


PLUGIN = read
