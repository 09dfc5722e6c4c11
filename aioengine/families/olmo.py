"""OLMo, the first: a Llama whose norms take the mean away and have no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, NormConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    attention_bias: bool = False
    clip_qkv: Annotated[float, Meta(gt=0)] | None = None


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    bias = found.attention_bias
    return replace(
        found.decoder(found.rope(config)),
        epsilon=1e-5,
        norm=NormConfig(kind="layer", has_weight=False),
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, clip=found.clip_qkv),
    )


PLUGIN = read
