"""Qwen2: biases on queries, keys and values, and a sliding window in the upper layers if it is switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.window is None or self.layer_types is not None:
            return super().windows
        full = min(max(self.max_window_layers, 0), self.num_hidden_layers)
        return (None,) * full + (self.window,) * (self.num_hidden_layers - full)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return replace(found.decoder(found.rope(config)), attention=AttentionConfig(qkv_bias=True))


PLUGIN = read
