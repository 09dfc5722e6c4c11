"""Qwen3.5 as it is published, with a vision tower, which is not loaded: its text model alone is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from msgspec.structs import replace

from aioengine.families._config import decode_config
from aioengine.families._vision import VisionFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig

RENAMED: Final = (("model.language_model.", "model."),)
TOWER: Final = "model.visual."


class Config(VisionFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    tower_types: ClassVar[tuple[str, ...]] = ("", "qwen3_5", "qwen3_5_vision")


def read(config: Mapping[str, object]) -> DecoderConfig:
    decoder = decode_config(config, Config).text(config)
    return replace(decoder, renamed=RENAMED, ignored=(*decoder.ignored, TOWER))


PLUGIN = read
