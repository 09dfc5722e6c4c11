"""Kimi-K2: a DeepSeek-V3."""

from aioengine.models.deepseek_v3 import DeepseekV3

PLUGIN = DeepseekV3
