"""Mistral, as far as it attends to all positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.models._decoder import Decoder, FamilyConfig, decode_config, not_implemented, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_window < self.max_position_embeddings:
            not_implemented("sliding_window", self.sliding_window, "null, or at least max_position_embeddings")


class Mistral(Decoder):
    """Without biases."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(decode_config(config, Config).decoder(read_rope(config)), options)


PLUGIN = Mistral
