"""The names and shapes of the tensors in the checkpoint of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.families._config import DecoderConfig

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Name -> shape of every tensor that is loaded."""
    embedding = (config.vocab_size, config.hidden_size)
    found: Shapes = {"model.embed_tokens.weight": embedding, "model.norm.weight": (config.hidden_size,)}
    if not config.tied:
        found["lm_head.weight"] = embedding
    block = {**_attention(config), **_mlp(config), **_norms(config)}
    for layer in range(config.num_layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return found


def is_ignored(config: DecoderConfig, name: str) -> bool:
    """Whether the checkpoint may hold this tensor although it is not loaded: a buffer, or a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _attention(config: DecoderConfig) -> Shapes:
    inner, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    found: Shapes = {}
    for name, size in (("q", inner), ("k", kv_size), ("v", kv_size)):
        found |= _linear(f"self_attn.{name}_proj", size, config.hidden_size, bias=config.qkv_bias)
    found |= _linear("self_attn.o_proj", config.hidden_size, inner, bias=config.output_bias)
    if config.head_norm is not None:
        found |= {f"self_attn.{name}_norm.weight": (config.head_size,) for name in ("q", "k")}
    return found


def _mlp(config: DecoderConfig) -> Shapes:
    outer, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return {
        **_linear("mlp.gate_proj", inner, outer, bias=bias),
        **_linear("mlp.up_proj", inner, outer, bias=bias),
        **_linear("mlp.down_proj", outer, inner, bias=bias),
    }


def _norms(config: DecoderConfig) -> Shapes:
    return {f"{name}_layernorm.weight": (config.hidden_size,) for name in ("input", "post_attention")}


def _linear(name: str, out_features: int, in_features: int, *, bias: bool) -> Shapes:
    found: Shapes = {f"{name}.weight": (out_features, in_features)}
    return {**found, f"{name}.bias": (out_features,)} if bias else found
