"""SmolLM3: a Llama without rotation in every fourth layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config, not_implemented

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 2e6

    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rotated) < self.num_hidden_layers:
            not_implemented("no_rope_layers", f"of {len(self.rotated)} layers", f"at least {self.num_hidden_layers}")

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.window is None or self.layer_types is not None:
            return super().windows
        return tuple(None if is_rotated else self.window for is_rotated in self.rotated)

    @property
    def rotated(self) -> list[bool]:
        """Whether each layer has a rotary embedding."""
        if self.no_rope_layers is not None:  # in spite of its name
            return [bool(value) for value in self.no_rope_layers[: self.num_hidden_layers]]
        return [(layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers)]


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    rope = found.rope(config)
    decoder, bias = found.decoder(rope), found.attention_bias
    return replace(
        decoder,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias),
        mlp=replace(decoder.mlp, has_bias=found.mlp_bias),
        layer_ropes=tuple(rope if is_rotated else None for is_rotated in found.rotated),
    )


PLUGIN = read
