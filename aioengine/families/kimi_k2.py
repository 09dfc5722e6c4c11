"""Kimi-K2: a DeepSeek-V3."""

from aioengine.families.deepseek_v3 import read

PLUGIN = read
