"""Gemma 3, its text model: a Gemma 2 with norms of heads, and another rotation in layers with a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.families._config import FamilyConfig, RopeConfig, decode_config, read_layer_rope
from aioengine.families.gemma2 import BLOCK, NORM, Positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.families._config import DecoderConfig


class Config(FamilyConfig, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_scalar: Positive = msgspec.field(default=256, name="query_pre_attn_scalar")
    sliding_window: int | None = 4096
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 6
    rope_theta: float | None = None
    rope_local_base_freq: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, dict[str, object] | None] | None = None
    final_logit_softcapping: Positive | None = None
    attention_cap: None = msgspec.field(default=None, name="attn_logit_softcapping")  # transformers caps no scores
    use_bidirectional_attention: Literal[False] | None = False

    @property
    def window(self) -> int | None:
        return self.sliding_window

    @property
    def kinds(self) -> list[str]:
        """Of each layer, as in ``layer_types``."""
        return [*(self.layer_types or ())] or [
            "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.kinds)

    def rope_of(self, kind: str, theta: float) -> RopeConfig:
        """The rotary embedding of the layers of this kind; ``theta``: where ``rope_parameters`` does not say it."""
        scaling = self.rope_scaling if kind == "full_attention" else None
        return read_layer_rope((self.rope_parameters or {}).get(kind), scaling, theta)


def read(config: Mapping[str, object]) -> DecoderConfig:
    found = decode_config(config, Config)
    ropes = {
        "full_attention": found.rope_of("full_attention", 1e6 if found.rope_theta is None else found.rope_theta),
        "sliding_attention": found.rope_of("sliding_attention", found.rope_local_base_freq or 1e4),
    }
    bias = found.attention_bias
    decoder = found.decoder(ropes["sliding_attention"])  # max_position_embeddings has the scaling of the other already
    ropes["full_attention"].check_head(decoder.head_size)
    return replace(
        decoder,
        norm=NORM,
        block=BLOCK,
        attention=AttentionConfig(
            qkv_bias=bias,
            output_bias=bias,
            scale=found.query_scalar**-0.5,
            head_norm=HeadNorm(norm=NORM),
        ),
        layer_ropes=tuple(ropes[kind] for kind in found.kinds),
        embedding_scale=found.hidden_size**0.5,
        logits_cap=found.final_logit_softcapping,
    )


PLUGIN = read
