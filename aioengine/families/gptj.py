"""GPT-J: attention and MLP side by side; a part of each head is rotated, neighbours in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from aioengine.families import gpt2
from aioengine.families._block_config import AttentionConfig, BlockConfig
from aioengine.families._config import FamilyConfig, RopeConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(gpt2.Config, frozen=True, kw_only=True):
    tasks = FamilyConfig.tasks

    vocab_size: int = 50_400
    hidden_size: int = msgspec.field(default=4096, name="n_embd")
    num_hidden_layers: int = msgspec.field(default=28, name="n_layer")
    num_attention_heads: int = msgspec.field(default=16, name="n_head")
    max_position_embeddings: int = msgspec.field(default=2048, name="n_positions")
    tie_word_embeddings: bool = False
    rotary_dim: Annotated[int, msgspec.Meta(ge=1)] | None = 64


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(gpt2.own_names(config, Config), Config)
    decoder, size = gpt2.gpt2_decoder(found), found.rotary_dim
    rope = RopeConfig(partial_rotary_factor=1.0 if size is None else size / decoder.head_size)
    rope.check_head(decoder.head_size)
    return replace(
        decoder,
        names=replace(decoder.names, positions=""),
        block=BlockConfig(attention="attn.", attention_norm="ln_1", mlp_norm="", is_parallel=True),
        attention=AttentionConfig(output="out_proj", is_interleaved=True),
        mlp=replace(decoder.mlp, first=("fc_in",), second="fc_out"),
        is_transposed=False,
        rope=rope,
        layer_ropes=(),
        head_bias=True,
    )


PLUGIN = read
