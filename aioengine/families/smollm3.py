"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import replace

from aioengine.families._config import DecoderConfig
from aioengine.families._fields import not_implemented
from aioengine.families.llama import LlamaFamily


class SmolLM3Family(LlamaFamily, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 2e6

    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rotated) < self.num_hidden_layers:
            not_implemented(
                "no_rope_layers", f"of length {len(self.rotated)}", f"one entry per layer ({self.num_hidden_layers})"
            )

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def has_window(self, layer: int) -> bool:
        return not self.rotated[layer]

    @property
    def rotated(self) -> list[bool]:
        """For each layer, whether it has a rotary embedding."""
        if self.no_rope_layers is not None:  # despite its name, 1 means that a layer has one
            return [bool(value) for value in self.no_rope_layers[: self.num_hidden_layers]]
        return [(layer + 1) % self.no_rope_layer_interval != 0 for layer in range(self.num_hidden_layers)]

    def decoder(self) -> DecoderConfig:
        decoder = super().decoder()
        return replace(decoder, layer_ropes=tuple(decoder.rope if is_rotated else None for is_rotated in self.rotated))


PLUGIN = SmolLM3Family
