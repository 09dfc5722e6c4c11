"""Mistral: no biases, and a sliding window in all layers or in none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import FamilyConfig, decode_config, not_implemented, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and "full_attention" in (self.layer_types or ()):
            not_implemented("layer_types", self.layer_types, "sliding_attention alone, where there is a sliding window")

    @property
    def window(self) -> int | None:
        return self.sliding_window


def read(config: Mapping[str, object]) -> DecoderConfig:
    return decode_config(config, Config).decoder(read_rope(config))


PLUGIN = read
