"""EXAONE 4: norms behind attention and MLP, and no rotation in layers that attend to all beside windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import FamilyConfig, decode_config, not_implemented
from aioengine.families.olmo2 import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.window is not None and (not isinstance(pattern, int) or pattern < 1):
            not_implemented("sliding_window_pattern", pattern, "a number, or layer_types")

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        pattern = self.sliding_window_pattern
        if self.layer_types is not None or self.window is None or not isinstance(pattern, int):
            return super().windows
        return tuple(self.window if (layer + 1) % pattern else None for layer in range(self.num_hidden_layers))


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    rope = found.rope(config)
    return replace(
        found.decoder(rope),
        block=BLOCK,
        attention=AttentionConfig(head_norm=HeadNorm()),
        layer_ropes=tuple(None if window is None else rope for window in found.windows),
    )


PLUGIN = read
