"""OLMo 3: an OLMo 2 with windows in three of four layers, which have a rotation of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import FamilyConfig, decode_config, read_layer_rope
from aioengine.families.olmo2 import BLOCK, NORM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig, RopeConfig


DEFAULT_THETA: Final = 5e5


class Config(FamilyConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = 4096
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, dict[str, object] | None] | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def kinds(self) -> list[str]:
        """Of each layer, as in ``layer_types``."""
        return [*(self.layer_types or ())] or [
            "sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.num_hidden_layers)
        ]

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.kinds)

    def rope_of(self, kind: str) -> RopeConfig:
        """The rotary embedding of the layers of this kind: only those that attend to all have a scaling."""
        given = (self.rope_parameters or {}).get(kind)
        if kind == "sliding_attention":
            return read_layer_rope(given, None, DEFAULT_THETA)
        return read_layer_rope(given, self.rope_scaling, self.rope_theta or DEFAULT_THETA)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    ropes = {kind: found.rope_of(kind) for kind in ("full_attention", "sliding_attention")}
    bias, head_norm = found.attention_bias, HeadNorm(norm=NORM, extent="all_heads")
    return replace(
        found.decoder(ropes["full_attention"]),
        norm=NORM,
        block=BLOCK,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=head_norm),
        layer_ropes=tuple(ropes[kind] for kind in found.kinds),
    )


PLUGIN = read
