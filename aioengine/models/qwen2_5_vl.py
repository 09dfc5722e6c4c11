"""Qwen2.5-VL: images of any size, and windows in most layers of the tower."""

from aioengine.models._qwen_decoder import QwenVision

PLUGIN = QwenVision
