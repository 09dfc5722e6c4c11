"""Idefics3 and SmolVLM: a SigLIP tower whose patches are merged, and a Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta

from aioengine.families._config import decode_config
from aioengine.families._vision import VisionFamily, vision_config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._vision import VisionConfig

RENAMED: Final = (
    ("model.text_model.", "model."),
    ("model.vision_model.", "vision_model."),
    ("model.connector.", "connector."),
)


class Config(VisionFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("llama",)
    text_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5}
    tower_types: ClassVar[tuple[str, ...]] = ("", "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")

    image_token_id: Annotated[int, Meta(ge=0)] = 128_257


def read(config: Mapping[str, object]) -> VisionConfig:
    found = decode_config(config, Config)
    return vision_config_of(
        found.text(config),
        image_token_id=found.image_token_id,
        towers=("vision_model.", "connector."),
        renamed=RENAMED,
    )


PLUGIN = read
