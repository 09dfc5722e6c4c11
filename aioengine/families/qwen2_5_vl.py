"""Qwen2.5-VL: the text model is a Qwen2 whose positions have three axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aioengine.families._qwen_vision import QwenFamily, read_qwen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._vision import VisionConfig


class Config(QwenFamily, frozen=True, kw_only=True):
    text_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl_text",)
    tower_types: ClassVar[tuple[str, ...]] = ("", "qwen2_5_vl", "qwen2_5_vl_vision")
    text_family: ClassVar[str] = "qwen2"


def read(config: Mapping[str, object]) -> VisionConfig:
    return read_qwen(config, Config)


PLUGIN = read
