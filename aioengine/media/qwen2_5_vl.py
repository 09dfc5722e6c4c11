"""Qwen2.5-VL: each token is a square of patches."""

from __future__ import annotations

from aioengine.media._qwen import QwenImages

PLUGIN = QwenImages
