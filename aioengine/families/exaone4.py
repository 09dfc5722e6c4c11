"""EXAONE 4: norms after attention and MLP, no rotary embedding in full-attention layers next to sliding windows."""

from __future__ import annotations

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import DecoderConfig, WindowFamily
from aioengine.families._fields import not_implemented
from aioengine.families.olmo import POST_NORMS


class Exaone4Family(WindowFamily, frozen=True, kw_only=True):
    block = POST_NORMS
    attention = AttentionConfig(head_norm=HeadNorm())

    rms_norm_eps: float = 1e-5
    sliding_window_pattern: int | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.window is not None and (not isinstance(pattern, int) or pattern < 1):
            not_implemented("sliding_window_pattern", pattern, "a positive integer, or a list in layer_types")

    def has_window(self, layer: int) -> bool:
        assert isinstance(self.sliding_window_pattern, int), "checked in __post_init__"
        return (layer + 1) % self.sliding_window_pattern != 0

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        ropes = tuple(None if window is None else decoder.rope for window in decoder.windows)
        return replace(decoder, layer_ropes=ropes)


PLUGIN = Exaone4Family
