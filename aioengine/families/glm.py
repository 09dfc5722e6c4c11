"""GLM-4 of 2024 and GLM-Edge: half of each head is rotated, neighbours in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    default_partial: ClassVar[float | None] = 0.5

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    max_position_embeddings: int = 131_072
    attention_bias: bool = True


def read(config: Mapping[str, object]) -> DecoderConfig:
    return glm_decoder(decode_config(config, Config), config)


def glm_decoder(found: Config, config: Mapping[str, object]) -> DecoderConfig:
    """The decoder of ``config``, whose fields ``found`` has."""
    decoder = found.decoder(found.rope(config))
    return replace(
        decoder,
        attention=AttentionConfig(qkv_bias=found.attention_bias, is_interleaved=True),
        mlp=replace(decoder.mlp, first=("gate_up_proj",)),
    )


PLUGIN = read
