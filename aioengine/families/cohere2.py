"""Cohere 2 (Command R7B, Command A): attention and MLP side by side, no rotation in layers that attend to all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_eps")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    attention_bias: bool = False
    sliding_window: int | None = 4096
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 4

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is not None:
            return super().windows
        layers = range(self.num_hidden_layers)
        return tuple(self.window if (layer + 1) % self.sliding_window_pattern else None for layer in layers)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    rope, bias = found.rope(config), found.attention_bias
    decoder = found.decoder(rope)
    return replace(
        decoder,
        norm=NormConfig(kind="layer"),
        block=BlockConfig(is_parallel=True, mlp_norm=""),
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, is_interleaved=True),
        layer_ropes=tuple(None if window is None else rope for window in found.windows) or (None,) * decoder.num_layers,
        logits_scale=found.logit_scale,
    )


PLUGIN = read
