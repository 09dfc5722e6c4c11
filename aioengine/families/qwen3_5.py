"""Qwen3.5: the checkpoint has a vision tower, but only the text model is served."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from aioengine.families._config import DecoderConfig
from aioengine.families._vision import VisionFamily
from aioengine.families.qwen3_next import DeltaNetFamily


class Qwen35TextFamily(DeltaNetFamily, frozen=True, kw_only=True):
    """Qwen3.5, text only: gated delta nets, and gated attention in every fourth layer."""

    is_grouped: ClassVar[bool] = False

    num_key_value_heads: int | None = 4

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        # the three axes of a position are equal for text
        return replace(decoder, rope=replace(decoder.rope, mrope_section=(), mrope_interleaved=False))


class Qwen35Family(VisionFamily, frozen=True, kw_only=True):
    text_types = ("qwen3_5_text",)
    tower_types = ("", "qwen3_5", "qwen3_5_vision")

    def decoder(self) -> DecoderConfig:
        decoder = self.text()
        return replace(
            decoder, renamed=(("model.language_model.", "model."),), ignored=(*decoder.ignored, "model.visual.")
        )


PLUGIN = Qwen35Family
