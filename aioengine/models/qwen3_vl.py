"""Qwen3-VL, dense: images of any size, whose features are added behind some layers too."""

from aioengine.models._qwen_decoder import QwenVision

PLUGIN = QwenVision
