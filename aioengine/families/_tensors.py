"""Names and shapes of a model's checkpoint tensors. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from aioengine.families._block_config import MambaConfig, NormConfig, ShortConvConfig
from aioengine.families._config import DecoderConfig, Task
from aioengine.families._encoders import EncoderConfig, LinearShape
from aioengine.families._experts import Shapes, quantized_tensors, tensors_of_experts
from aioengine.families._vision import VisionConfig

if TYPE_CHECKING:
    from aioengine.families._block_config import DeltaNetConfig, LatentConfig
    from aioengine.families._config import TransformerConfig


def tensor_shapes(config: TransformerConfig) -> Shapes:
    """Return name -> shape of all tensors that the model loads, except those of a vision tower."""
    if isinstance(config, EncoderConfig):
        return _encoder(config)
    assert isinstance(config, DecoderConfig)
    names, size = config.names, config.hidden_size
    shapes: Shapes = {f"{names.embedding}.weight": (config.vocab_size, size)}
    shapes |= _norm(names.norm, size, config.norm)
    if names.positions:
        shapes[f"{names.positions}.weight"] = (names.first_position + config.max_position_embeddings, size)
    for name, outputs in config.head.items():
        shapes |= _linear(LinearShape(name, outputs, size, config.head_bias and name == names.head))
    for layer in range(config.num_layers):
        shapes |= {f"{names.block(layer)}{name}": shape for name, shape in block_shapes(config, layer).items()}
    return shapes


def block_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Return name within the block -> shape of the tensors of a block."""
    return {**attention_shapes(config, layer), **mlp_shapes(config, layer), **_norms(config)}


def adaptable_layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the linear layers that adapters may change."""
    return {
        f"{config.names.block(layer)}{linear.name}": (linear.outputs, linear.inputs)
        for layer in range(config.num_layers)
        for linear in (*attention_linears(config, layer), *mlp_linears(config, layer))
    }


def exact_types(config: TransformerConfig) -> dict[str, str]:
    """Return name -> safetensors dtype of the quantized tensors, which must have exactly this dtype."""
    if not isinstance(config, DecoderConfig):
        return {}
    types: dict[str, str] = {}
    for layer in range(config.num_layers):
        if (experts := config.experts_of(layer)) is not None:
            prefix = f"{config.names.block(layer)}{config.block.mlp}"
            quantized = quantized_tensors(experts, config.hidden_size)
            types |= {f"{prefix}{name}": kind for name, (_, kind) in quantized.items()}
    return types


def is_ignored(config: TransformerConfig, name: str) -> bool:
    """Return whether a checkpoint tensor may be skipped: a buffer, an unused head, or a part that we do not load."""
    if isinstance(config, EncoderConfig):
        return name.endswith("position_ids") or name.startswith(config.ignored)
    if isinstance(config, VisionConfig) and name.startswith(config.towers):
        return True
    assert isinstance(config, DecoderConfig)
    if config.ignored and name.startswith(config.ignored):
        return True
    has_no_head = config.task is not Task.GENERATE or config.tied
    return name.endswith(config.buffers) or (has_no_head and name.startswith(f"{config.names.head}."))


def attention_linears(config: DecoderConfig, layer: int) -> list[LinearShape]:
    """Return the linear layers of a layer's attention that adapters may change."""
    attention, prefix, size = config.attention, config.block.attention, config.hidden_size
    if attention.latent is not None:
        return _latent_linears(config, attention.latent)
    if config.stateful is not None and config.keeps_state(layer):
        return _stateful_linears(config.stateful, size)
    inner, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    queries = 2 * inner if attention.has_output_gate else inner
    sizes = (queries, kv_size, kv_size) if len(attention.qkv) > 1 else (inner + 2 * kv_size,)
    return [
        *(
            LinearShape(f"{prefix}{name}", outputs, size, attention.qkv_bias)
            for name, outputs in zip(attention.qkv, sizes, strict=True)
        ),
        LinearShape(f"{prefix}{attention.output}", size, inner, attention.output_bias),
    ]


def _latent_linears(config: DecoderConfig, latent: LatentConfig) -> list[LinearShape]:
    attention, prefix, size = config.attention, config.block.attention, config.hidden_size
    queries = config.num_heads * (latent.plain_size + latent.rotated_size)
    if latent.query_rank is None:
        layers = [LinearShape(f"{prefix}q_proj", queries, size, attention.qkv_bias)]
    else:
        layers = [
            LinearShape(f"{prefix}q_a_proj", latent.query_rank, size, attention.qkv_bias),
            LinearShape(f"{prefix}q_b_proj", queries, latent.query_rank, False),
        ]
    inner = config.num_heads * latent.value_size
    return [
        *layers,
        LinearShape(f"{prefix}kv_a_proj_with_mqa", latent.rank + latent.rotated_size, size, attention.qkv_bias),
        LinearShape(f"{prefix}{attention.output}", size, inner, attention.output_bias),
    ]


def _latent_shapes(config: DecoderConfig, latent: LatentConfig) -> Shapes:
    """Return the tensors of latent attention that do not belong to its linear layers."""
    prefix, head_size = config.block.attention, latent.plain_size + latent.value_size
    shapes: Shapes = {f"{prefix}kv_b_proj.weight": (config.num_heads * head_size, latent.rank)}
    shapes |= _norm(f"{prefix}kv_a_layernorm", latent.rank, config.norm)
    if latent.query_rank is not None:
        shapes |= _norm(f"{prefix}q_a_layernorm", latent.query_rank, config.norm)
    return shapes


def _stateful_linears(net: DeltaNetConfig | ShortConvConfig | MambaConfig, size: int) -> list[LinearShape]:
    """Return the linear layers of a layer with a recurrent state. ``size``: the hidden size."""
    if isinstance(net, ShortConvConfig):
        sizes = {"in_proj": 3 * size, "out_proj": size}
        return [LinearShape(f"{net.prefix}{name}", outputs, size, net.has_bias) for name, outputs in sizes.items()]
    if isinstance(net, MambaConfig):
        values = net.num_heads * net.value_size
        first = LinearShape(f"{net.prefix}in_proj", net.num_inputs, size, net.has_bias)
        return [first, LinearShape(f"{net.prefix}out_proj", size, values, net.has_bias)]
    inputs = [LinearShape(f"{net.prefix}{name}", outputs, size, False) for name, outputs in net.inputs.items()]
    return [*inputs, LinearShape(f"{net.prefix}out_proj", size, net.num_value_heads * net.value_size, False)]


def _stateful_shapes(net: DeltaNetConfig | ShortConvConfig | MambaConfig, size: int) -> Shapes:
    """Return the other tensors of a layer with a recurrent state. ``size``: the hidden size."""
    if isinstance(net, ShortConvConfig):
        shapes: Shapes = {f"{net.prefix}conv.weight": (size, 1, net.width)}
        return {**shapes, f"{net.prefix}conv.bias": (size,)} if net.has_bias else shapes
    if isinstance(net, MambaConfig):
        shapes = {f"{net.prefix}{name}": (net.num_heads,) for name in ("A_log", "dt_bias", "D")}
        shapes |= {f"{net.prefix}conv1d.weight": (net.num_channels, 1, net.width)}
        shapes |= {f"{net.prefix}norm.weight": (net.num_heads * net.value_size,)}
        return {**shapes, f"{net.prefix}conv1d.bias": (net.num_channels,)} if net.has_conv_bias else shapes
    shapes = {f"{net.prefix}{name}": (net.num_value_heads,) for name in ("A_log", "dt_bias")}
    shapes[f"{net.prefix}conv1d.weight"] = net.num_channels, 1, net.width
    return {**shapes, f"{net.prefix}norm.weight": (net.value_size,)}


def attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Return the tensors of a layer's attention."""
    shapes: Shapes = {}
    for linear in attention_linears(config, layer):
        shapes |= _linear(linear, is_transposed=config.is_transposed)
    if (latent := config.attention.latent) is not None:
        shapes |= _latent_shapes(config, latent)
    if config.stateful is not None and config.keeps_state(layer):
        return shapes | _stateful_shapes(config.stateful, config.hidden_size)
    if config.attention.has_sinks:
        shapes |= {f"{config.block.attention}sinks": (config.num_heads,)}
    if (head_norm := config.attention.head_norm) is not None:
        for name, num_heads in zip(head_norm.names, (config.num_heads, config.num_kv_heads), strict=True):
            size = head_norm.shape(num_heads, config.head_size)
            for part in head_norm.parts(name, num_heads):
                shapes |= _norm(f"{config.block.attention}{part}", size, head_norm.norm)
    return shapes


def mlp_linears(config: DecoderConfig, layer: int) -> list[LinearShape]:
    """Return the linear layers of a layer's MLP, which adapters may change. Experts have none."""
    if config.experts_of(layer) is not None:
        return []
    mlp, prefix, bias = config.mlp, config.block.mlp, config.mlp.has_bias
    outer, inner = config.hidden_size, config.intermediate_size
    size = 2 * inner if mlp.is_gated and len(mlp.first) == 1 else inner
    first = [LinearShape(f"{prefix}{name}", size, outer, bias) for name in mlp.first]
    return [*first, LinearShape(f"{prefix}{mlp.second}", outer, inner, bias)]


def mlp_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """Return the tensors of a layer's MLP or experts."""
    if (experts := config.experts_of(layer)) is not None:
        tensors = tensors_of_experts(experts, config.hidden_size)
        return {f"{config.block.mlp}{name}": shape for name, shape in tensors.items()}
    shapes: Shapes = {}
    for linear in mlp_linears(config, layer):
        shapes |= _linear(linear, is_transposed=config.is_transposed)
    return shapes


def _norms(config: DecoderConfig) -> Shapes:
    shapes: Shapes = {}
    for name in config.block.norms:
        shapes |= _norm(name, config.hidden_size, config.norm)
    return shapes


def _encoder(config: EncoderConfig) -> Shapes:
    prefix, size, norm = config.prefix, config.hidden_size, NormConfig(kind="layer", has_bias=config.norm_bias)
    shapes: Shapes = {f"{prefix}{name}.weight": (rows, size) for name, rows in config.embeddings.items()}
    for name in config.norms:
        shapes |= _norm(f"{prefix}{name}", size, norm)
    for layer in range(config.num_layers):
        block = f"{prefix}{config.blocks}.{layer}."
        for linear in config.linears:
            shapes |= _linear(replace(linear, name=f"{block}{linear.name}"))
        for name in config.block_norms:
            if layer or name != config.first_without:
                shapes |= _norm(f"{block}{name}", size, norm)
    if (head := config.head) is not None:
        shapes |= _linear(LinearShape(head.dense, size, size, head.dense_bias))
        shapes |= _norm(head.norm, size, norm) if head.norm else {}
        shapes |= _linear(LinearShape(head.scores, config.num_labels, size, True))
    return shapes


def _norm(name: str, size: int | tuple[int, ...], norm: NormConfig) -> Shapes:
    shape = (size,) if isinstance(size, int) else size
    shapes: Shapes = {f"{name}.weight": shape} if norm.has_weight else {}
    return {**shapes, f"{name}.bias": shape} if norm.has_bias else shapes


def _linear(linear: LinearShape, *, is_transposed: bool = False) -> Shapes:
    shape = (linear.inputs, linear.outputs) if is_transposed else (linear.outputs, linear.inputs)
    shapes: Shapes = {f"{linear.name}.weight": shape}
    return {**shapes, f"{linear.name}.bias": (linear.outputs,)} if linear.has_bias else shapes
