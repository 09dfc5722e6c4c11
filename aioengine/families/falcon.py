"""Falcon 7B, 40B, 180B and Falcon 2: parallel attention and MLP, rotary positions (no ALiBi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import field

from aioengine.families._block_config import AttentionConfig, BlockConfig, MlpConfig, NormConfig, TensorNames
from aioengine.families._config import DecoderConfig, DecoderFamily
from aioengine.families._fields import not_implemented


class FalconFamily(DecoderFamily, frozen=True, kw_only=True):
    names = TensorNames(embedding="transformer.word_embeddings", layers="transformer.h", norm="transformer.ln_f")
    prefix = "transformer."
    norm = NormConfig(kind="layer", has_bias=True)
    attention = AttentionConfig(qkv=("query_key_value",), is_grouped=True, output="dense")
    mlp = MlpConfig(first=("dense_h_to_4h",), second="dense_4h_to_h", is_gated=False)

    hidden_act: str = field(default="gelu", name="activation")
    rms_norm_eps: float = field(default=1e-5, name="layer_norm_epsilon")
    num_key_value_heads: int | None = field(default=None, name="num_kv_heads")
    intermediate_size: int = field(name="ffn_hidden_size")
    tie_word_embeddings: bool = True
    alibi: Literal[False] | None = False
    attention_bias: bool | None = field(default=False, name="bias")
    multi_query: bool | None = True
    is_parallel: bool | None = field(default=True, name="parallel_attn")
    new_decoder_architecture: bool | None = False
    num_norms: Literal[1, 2] | None = field(default=None, name="num_ln_in_parallel_attn")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_decoder_architecture and not self.is_parallel:
            not_implemented("parallel_attn", self.is_parallel, "true with new_decoder_architecture")

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json, with defaults that depend on other fields."""
        size, inner = config.get("n_embed", config.get("hidden_size")), config.get("ffn_hidden_size")
        if inner is None and isinstance(size, int):
            inner = 4 * size
        return super().read({**config, "hidden_size": size, "ffn_hidden_size": inner})

    @property
    def num_kv_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_key_value_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def mlp_bias(self) -> bool:
        return bool(self.attention_bias)

    @property
    def block(self) -> BlockConfig:
        """One or two norms in a parallel block, otherwise one each before attention and MLP."""
        if not self.is_parallel:
            return BlockConfig(attention="self_attention.")
        if self.new_decoder_architecture and self.num_norms != 1:
            return BlockConfig(
                attention="self_attention.", attention_norm="ln_attn", mlp_norm="ln_mlp", is_parallel=True
            )
        return BlockConfig(attention="self_attention.", mlp_norm="", is_parallel=True)


PLUGIN = FalconFamily
