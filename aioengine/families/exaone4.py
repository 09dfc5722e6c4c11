"""EXAONE 4: norms after attention and MLP, no rotary embedding in full-attention layers next to sliding windows."""

from __future__ import annotations

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import DecoderFamily
from aioengine.families._fields import not_implemented
from aioengine.families._rope_config import RopeConfig
from aioengine.families.olmo import POST_NORMS


class Exaone4Family(DecoderFamily, frozen=True, kw_only=True):
    block = POST_NORMS
    attention = AttentionConfig(head_norm=HeadNorm())

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.window is not None and (not isinstance(pattern, int) or pattern < 1):
            not_implemented("sliding_window_pattern", pattern, "a positive integer, or a list in layer_types")

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        rope = self.rope
        return tuple(None if window is None else rope for window in self.windows)


PLUGIN = Exaone4Family
