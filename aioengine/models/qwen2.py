"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.models._decoder import Decoder, FamilyConfig, decode_config, not_implemented, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    use_sliding_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_sliding_window:
            not_implemented("use_sliding_window", self.use_sliding_window, "false")


class Qwen2(Decoder):
    """Biases on queries, keys and values."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        read = decode_config(config, Config)
        super().__init__(replace(read.decoder(read_rope(config)), qkv_bias=True), options)


PLUGIN = Qwen2
