"""Gemma 2: norms before and behind attention and MLP, caps of scores and logits, windows in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, BlockConfig, NormConfig
from aioengine.families._config import FamilyConfig, decode_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


Positive = Annotated[float, msgspec.Meta(gt=0)]
NORM: Final = NormConfig(offset=1.0)
BLOCK: Final = BlockConfig(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_scalar: Positive = msgspec.field(default=256, name="query_pre_attn_scalar")
    sliding_window: int | None = 4096
    final_logit_softcapping: Positive | None = 30.0
    attention_cap: Positive | None = msgspec.field(default=50.0, name="attn_logit_softcapping")
    use_bidirectional_attention: Literal[False] | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        if self.layer_types is not None:
            return super().windows
        return tuple(None if layer % 2 else self.window for layer in range(self.num_hidden_layers))


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    return replace(
        found.decoder(found.rope(config)),
        norm=NORM,
        block=BLOCK,
        attention=AttentionConfig(
            qkv_bias=found.attention_bias,
            output_bias=found.attention_bias,
            scale=found.query_scalar**-0.5,
            soft_cap=found.attention_cap,
        ),
        embedding_scale=found.hidden_size**0.5,
        logits_cap=found.final_logit_softcapping,
    )


PLUGIN = read
