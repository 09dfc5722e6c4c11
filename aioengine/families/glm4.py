"""GLM-4: norms before and behind attention and MLP; half of each head is rotated, neighbours in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import BlockConfig
from aioengine.families._config import decode_config
from aioengine.families.glm import Config, glm_decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


def read(config: Mapping[str, object]) -> DecoderConfig:
    norms = BlockConfig(attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")
    return replace(glm_decoder(decode_config(config, Config), config), block=norms)


PLUGIN = read
