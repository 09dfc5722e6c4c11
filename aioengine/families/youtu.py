"""Youtu-LLM: latent attention as DeepSeek-V3 has it, and an MLP in all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import decode_config
from aioengine.families._latent import LatentFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(LatentFamily, frozen=True, kw_only=True):
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return found.latent_decoder(found.rope(config))


PLUGIN = read
