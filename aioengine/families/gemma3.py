"""Gemma 3 with images: a SigLIP tower, average pooling to a fixed number of tokens, and the Gemma 3 text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, cast

from msgspec import Meta

from aioengine.families._config import DecoderConfig
from aioengine.families._fields import not_implemented
from aioengine.families.llava import LlavaFamily

TOWER: Final = "siglip_vision_model"


class Gemma3Family(LlavaFamily, frozen=True, kw_only=True):
    text_types = ("gemma3_text",)
    tower_types = (TOWER,)
    default_placeholder_id: ClassVar[int] = 262_144

    mm_tokens_per_image: Annotated[int, Meta(ge=1)] = 256

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. ``tie_word_embeddings`` is a field of the whole model."""
        text, tied = _part(config, "text_config"), config.get("tie_word_embeddings", True)
        tower = {"model_type": TOWER, **_part(config, "vision_config")}
        return super().read({**config, "text_config": {**text, "tie_word_embeddings": tied}, "vision_config": tower})

    def decoder(self) -> DecoderConfig:
        return self.with_images(self.text(), whole_image_tokens=self.mm_tokens_per_image)


def _part(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = config.get(name) or {}
    if not isinstance(part, dict):
        not_implemented(name, part, "an object")
    return cast("dict[str, object]", part)


PLUGIN = Gemma3Family
