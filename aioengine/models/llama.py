"""Llama: Llama 1 to 3, and the many models that were trained in its form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.models._decoder import Decoder, FamilyConfig, decode_config, read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Config(FamilyConfig, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class Llama(Decoder):
    """Biases, where there are any, on all projections of attention, or of the MLP."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        read = decode_config(config, Config)
        biases = {"qkv_bias": read.attention_bias, "output_bias": read.attention_bias, "mlp_bias": read.mlp_bias}
        super().__init__(replace(read.decoder(read_rope(config)), **biases), options)


PLUGIN = Llama
