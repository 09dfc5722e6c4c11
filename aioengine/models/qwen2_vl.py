"""Qwen2-VL: images of any size."""

from aioengine.models._qwen_decoder import QwenVision

PLUGIN = QwenVision
