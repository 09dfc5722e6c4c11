"""Youtu-LLM: latent attention as in DeepSeek-V3, and an MLP in all layers."""

from __future__ import annotations

from aioengine.families._latent import LatentFamily


class YoutuFamily(LatentFamily, frozen=True, kw_only=True):
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True


PLUGIN = YoutuFamily
