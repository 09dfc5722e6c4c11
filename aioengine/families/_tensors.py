"""The names and shapes of the tensors in the checkpoint of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families._config import DecoderConfig, Task
from aioengine.families._encoders import EncoderConfig
from aioengine.families._vision import VisionConfig

if TYPE_CHECKING:
    from aioengine.families._config import TransformerConfig

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: TransformerConfig) -> Shapes:
    """Name -> shape of every tensor that is loaded; those of a vision tower are known to its model alone."""
    if isinstance(config, EncoderConfig):
        return _encoder(config)
    assert isinstance(config, DecoderConfig)
    embedding = (config.vocab_size, config.hidden_size)
    found: Shapes = {"model.embed_tokens.weight": embedding, "model.norm.weight": (config.hidden_size,)}
    found |= {f"{name}.weight": (size, config.hidden_size) for name, size in config.head.items()}
    block = {**_attention(config), **_mlp(config), **_norms(config)}
    for layer in range(config.num_layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return found


def is_ignored(config: TransformerConfig, name: str) -> bool:
    """Whether the checkpoint may hold this tensor although it is not loaded: a buffer, or a head that is not used."""
    if isinstance(config, EncoderConfig):
        return name.endswith("position_ids") or name.startswith(config.ignored)
    if isinstance(config, VisionConfig) and name.startswith(config.towers):
        return True
    has_no_head = config.task is not Task.GENERATE or (isinstance(config, DecoderConfig) and config.tied)
    return name.endswith("rotary_emb.inv_freq") or (has_no_head and name == "lm_head.weight")


def _encoder(config: EncoderConfig) -> Shapes:
    prefix, size, norm_bias = config.prefix, config.hidden_size, config.norm_bias
    found: Shapes = {f"{prefix}{name}.weight": (rows, size) for name, rows in config.embeddings.items()}
    for name in config.norms:
        found |= _norm(f"{prefix}{name}", size, bias=norm_bias)
    for layer in range(config.num_layers):
        block = f"{prefix}{config.blocks}.{layer}."
        for linear in config.linears:
            found |= _linear(f"{block}{linear.name}", linear.outputs, linear.inputs, bias=linear.has_bias)
        for name in config.block_norms:
            if layer or name != config.first_without:
                found |= _norm(f"{block}{name}", size, bias=norm_bias)
    if (head := config.head) is not None:
        found |= _linear(head.dense, size, size, bias=head.dense_bias)
        found |= _norm(head.norm, size, bias=norm_bias) if head.norm else {}
        found |= _linear(head.scores, config.num_labels, size, bias=True)
    return found


def _norm(name: str, size: int, *, bias: bool) -> Shapes:
    found: Shapes = {f"{name}.weight": (size,)}
    return {**found, f"{name}.bias": (size,)} if bias else found


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
