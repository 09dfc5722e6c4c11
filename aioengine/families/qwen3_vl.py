"""Qwen3-VL, dense: the text model is a Qwen3 whose positions have three axes, which take turns in a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aioengine.families._qwen_vision import QwenFamily, read_qwen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._vision import VisionConfig


class Config(QwenFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("qwen3_vl_text",)
    tower_types: ClassVar[tuple[str, ...]] = ("", "qwen3_vl", "qwen3_vl_vision")
    text_family: ClassVar[str] = "qwen3"
    rope: ClassVar[dict[str, object]] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    num_deepstack: ClassVar[int] = 3


def read(config: Mapping[str, object]) -> VisionConfig:
    return read_qwen(config, Config)


PLUGIN = read
