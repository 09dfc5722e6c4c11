"""Mistral: no biases, and a sliding window in all layers or in none."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    has_one_window: ClassVar[bool] = True

    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return found.decoder(found.rope(config))


PLUGIN = read
