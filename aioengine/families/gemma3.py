"""Gemma 3 that reads images: a SigLIP tower, whose patches are averaged to a fixed number of tokens, and a Gemma 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from msgspec import Meta

from aioengine.families._config import decode_config, not_implemented
from aioengine.families._vision import VisionFamily, vision_config_of
from aioengine.families.llava import RENAMED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._vision import VisionConfig

TOWER = "siglip_vision_model"


class Config(VisionFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    tower_types: ClassVar[tuple[str, ...]] = (TOWER,)

    image_token_index: Annotated[int, Meta(ge=0)] | None = None
    image_token_id: Annotated[int, Meta(ge=0)] | None = None
    mm_tokens_per_image: Annotated[int, Meta(ge=1)] = 256


def read(config: Mapping[str, object]) -> VisionConfig:
    fields = dict(config)
    # Whether the head is tied is said for the whole model.
    fields["text_config"] = {
        **_part(config, "text_config"),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    fields["vision_config"] = {"model_type": TOWER, **_part(config, "vision_config")}
    found = decode_config(fields, Config)
    image_token_id = found.image_token_index if found.image_token_id is None else found.image_token_id
    return vision_config_of(
        found.text(config),
        image_token_id=262_144 if image_token_id is None else image_token_id,
        towers=("vision_tower.", "multi_modal_projector."),
        renamed=RENAMED,
        whole_image_tokens=found.mm_tokens_per_image,
    )


def _part(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = config.get(name) or {}
    if not isinstance(part, dict):
        not_implemented(name, part, "an object")
    return cast("dict[str, object]", part)


PLUGIN = read
