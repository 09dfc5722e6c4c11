"""Qwen3-VL."""

from __future__ import annotations

from aioengine.media._qwen import QwenImages

PLUGIN = QwenImages
