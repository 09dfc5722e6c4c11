"""Qwen3, dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.models._decoder import Decoder, FamilyConfig, decode_config, not_implemented, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    use_sliding_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_sliding_window:
            not_implemented("use_sliding_window", self.use_sliding_window, "false")


class Qwen3(Decoder):
    """A norm over each head of queries and keys."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        read = decode_config(config, Config)
        decoder = replace(
            read.decoder(read_rope(config)),
            qkv_bias=read.attention_bias,
            output_bias=read.attention_bias,
            head_norm=read.rms_norm_eps,
        )
        super().__init__(decoder, options)


PLUGIN = Qwen3
