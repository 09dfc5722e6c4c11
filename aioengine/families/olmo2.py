"""OLMo 2: norms behind attention and MLP, and over all query and all key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, HeadNorm, NormConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


NORM: Final = NormConfig(is_wide=True)
BLOCK: Final = BlockConfig(
    attention_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)


class Config(FamilyConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    bias, head_norm = found.attention_bias, HeadNorm(norm=NORM, extent="all_heads")
    return replace(
        found.decoder(found.rope(config)),
        norm=NORM,
        block=BLOCK,
        attention=AttentionConfig(qkv_bias=bias, output_bias=bias, head_norm=head_norm),
    )


PLUGIN = read
