"""The tensors of a model's checkpoint. Torch-free.

Linear layers are described by a function, because a quantized checkpoint stores them differently. It receives a
``LinearShape`` with the full name of the layer, so it can keep some layers unquantized. Its counterpart with torch is
``ModelOptions.format_of``.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aioengine.families._block_config import (
    DeltaNetConfig,
    LatentConfig,
    LinearShape,
    MambaConfig,
    MlpConfig,
    NormConfig,
    ShortConvConfig,
    TensorSpec,
    TensorSpecs,
)
from aioengine.families._config import DecoderConfig, Task, TransformerConfig
from aioengine.families._draft_heads import DraftHeadConfig
from aioengine.families._encoders import EncoderConfig
from aioengine.families._experts import CHOICE_BIAS, MXFP4_BLOCK, ExpertsConfig, RouterConfig
from aioengine.families._vision import VisionConfig

LinearTensors = Callable[[LinearShape], TensorSpecs]
"""Returns the tensors of a linear layer, in the checkpoint or in memory, by the last part of their names."""
TableTensors = Callable[[LinearShape, bool], TensorSpecs]
"""Does the same for the table of token embeddings. The second argument says whether it is also the head."""


def plain_tensors(linear: LinearShape) -> TensorSpecs:
    """Describe a layer that is not quantized."""
    specs = {"weight": TensorSpec((linear.outputs, linear.inputs))}
    return specs | {"bias": TensorSpec((linear.outputs,))} if linear.has_bias else specs


def checkpoint_tensors(config: TransformerConfig, linear_tensors: LinearTensors = plain_tensors) -> TensorSpecs:
    """Return all tensors that the model loads, without a vision tower."""
    if isinstance(config, EncoderConfig):
        return _encoder(config, linear_tensors)
    if isinstance(config, DraftHeadConfig):
        return _draft_head(config, linear_tensors)
    assert isinstance(config, DecoderConfig)
    names, size = config.names, config.hidden_size
    specs = {f"{names.embedding}.weight": TensorSpec((config.vocab_size, size)), **_norm(names.norm, size, config.norm)}
    if names.positions:
        num_positions = names.first_position + config.max_position_embeddings
        specs[f"{names.positions}.weight"] = TensorSpec((num_positions, size))
    if config.head is not None:
        specs |= _linears([config.head], linear_tensors)
    for layer in range(config.num_layers):
        specs |= block_tensors(config, layer, linear_tensors)
    return specs


def linear_layers(config: TransformerConfig) -> list[LinearShape]:
    """Return all linear layers that may be quantized, with one expert of each block."""
    if isinstance(config, DecoderConfig) and config.experts is not None:
        config = replace(config, experts=replace(config.experts, num_experts=1, top_k=1, router=RouterConfig()))
    linears: list[LinearShape] = []

    def describe(linear: LinearShape) -> TensorSpecs:
        linears.append(linear)
        return plain_tensors(linear)

    checkpoint_tensors(config, describe)
    return linears


def block_tensors(config: DecoderConfig, layer: int, linear_tensors: LinearTensors = plain_tensors) -> TensorSpecs:
    """Return the tensors of a block."""
    specs = _linears(block_linears(config, layer), linear_tensors, is_transposed=config.is_transposed)
    block, others = config.names.block(layer), _attention(config, layer)
    if (latent := config.attention.latent) is not None:
        outputs = config.num_heads * (latent.plain_size + latent.value_size)
        expansion = LinearShape(f"{block}{config.block.attention}kv_b_proj", outputs, latent.rank, False)
        specs |= _linears([expansion], linear_tensors)
    if (experts := config.experts_of(layer)) is not None:
        specs |= expert_tensors(experts, config.hidden_size, f"{block}{config.block.mlp}", linear_tensors)
    for name in config.block.norms:
        others |= _norm(name, config.hidden_size, config.norm)
    return specs | _prefixed(block, others)


def adaptable_layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the linear layers that adapters may change."""
    linears = (linear for layer in range(config.num_layers) for linear in block_linears(config, layer))
    return {linear.name: (linear.outputs, linear.inputs) for linear in linears}


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


def block_linears(config: DecoderConfig, layer: int) -> list[LinearShape]:
    """Return the linear layers of a block, which adapters may change. Layers of experts are not among them."""
    block, mixer = config.names.block(layer), config.mixer_prefix(layer)
    linears = [replace(linear, name=f"{block}{mixer}{linear.name}") for linear in mixer_linears(config, layer)]
    if config.experts_of(layer) is None:
        mlp = mlp_linears(config.mlp, config.hidden_size, config.intermediate_size)
        linears += [replace(linear, name=f"{block}{config.block.mlp}{linear.name}") for linear in mlp]
    return linears


def mlp_linears(mlp: MlpConfig, outer: int, inner: int) -> list[LinearShape]:
    """Return the linear layers of an MLP. The last one is the output layer."""
    size = 2 * inner if mlp.is_gated and len(mlp.first) == 1 else inner
    first = [LinearShape(name, size, outer, mlp.has_bias) for name in mlp.first]
    return [*first, LinearShape(mlp.second, outer, inner, mlp.has_bias)]


def mixer_linears(config: DecoderConfig, layer: int) -> list[LinearShape]:
    """Return the linear layers of a layer's attention, or of the layer that replaces it. The last one is the output."""
    attention, size = config.attention, config.hidden_size
    if config.stateful is not None and config.keeps_state(layer):
        return stateful_linears(config.stateful, size)
    if attention.latent is not None:
        return _latent_linears(config, attention.latent)
    inner, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    queries = 2 * inner if attention.has_output_gate else inner
    sizes = (queries, kv_size, kv_size) if len(attention.qkv) > 1 else (inner + 2 * kv_size,)
    named = zip(attention.qkv, sizes, strict=True)
    inputs = attention.num_inputs * size
    first = [LinearShape(name, outputs, inputs, attention.qkv_bias) for name, outputs in named]
    return [*first, LinearShape(attention.output, size, inner, attention.output_bias)]


def _latent_linears(config: DecoderConfig, latent: LatentConfig) -> list[LinearShape]:
    attention, size = config.attention, config.hidden_size
    queries = config.num_heads * (latent.plain_size + latent.rotated_size)
    if latent.query_rank is None:
        first = [LinearShape("q_proj", queries, size, attention.qkv_bias)]
    else:
        first = [
            LinearShape("q_a_proj", latent.query_rank, size, attention.qkv_bias),
            LinearShape("q_b_proj", queries, latent.query_rank, False),
        ]
    inner = config.num_heads * latent.value_size
    return [
        *first,
        LinearShape("kv_a_proj_with_mqa", latent.rank + latent.rotated_size, size, attention.qkv_bias),
        LinearShape(attention.output, size, inner, attention.output_bias),
    ]


def stateful_linears(net: DeltaNetConfig | ShortConvConfig | MambaConfig, size: int) -> list[LinearShape]:
    """Return the linear layers of a layer with a recurrent state. ``size``: the hidden size."""
    has_bias, inner = False, size
    if isinstance(net, ShortConvConfig):
        inputs, has_bias = {"in_proj": 3 * size}, net.has_bias
    elif isinstance(net, MambaConfig):
        inputs, has_bias, inner = {"in_proj": net.num_inputs}, net.has_bias, net.num_heads * net.value_size
    else:
        inputs, inner = net.inputs, net.num_value_heads * net.value_size
    first = [LinearShape(name, outputs, size, has_bias) for name, outputs in inputs.items()]
    return [*first, LinearShape("out_proj", size, inner, has_bias)]


def _attention(config: DecoderConfig, layer: int) -> TensorSpecs:
    """Return the tensors of a layer's attention, or its replacement, that are not linear layers.

    Names are relative to the block.
    """
    if config.stateful is not None and config.keeps_state(layer):
        return _prefixed(config.stateful.prefix, stateful_tensors(config.stateful, config.hidden_size))
    attention, specs = config.attention, TensorSpecs()
    if (latent := attention.latent) is not None:
        specs |= _norm("kv_a_layernorm", latent.rank, config.norm)
        if latent.query_rank is not None:
            specs |= _norm("q_a_layernorm", latent.query_rank, config.norm)
    if attention.has_sinks:
        specs["sinks"] = TensorSpec((config.num_heads,))
    if (head_norm := attention.head_norm) is not None:
        for name, num_heads in zip(head_norm.names, (config.num_heads, config.num_kv_heads), strict=True):
            for part in head_norm.parts(name, num_heads):
                specs |= _norm(part, head_norm.shape(num_heads, config.head_size), head_norm.norm)
    return _prefixed(config.block.attention, specs)


def stateful_tensors(net: DeltaNetConfig | ShortConvConfig | MambaConfig, size: int) -> TensorSpecs:
    """Return the tensors of a layer with a recurrent state that are not linear. ``size``: the hidden size."""
    if isinstance(net, ShortConvConfig):
        name, num_channels, has_bias = "conv", size, net.has_bias
        shapes: dict[str, tuple[int, ...]] = {}
    elif isinstance(net, MambaConfig):
        name, num_channels, has_bias = "conv1d", net.num_channels, net.has_conv_bias
        shapes = dict.fromkeys(("A_log", "dt_bias", "D"), (net.num_heads,))
        shapes["norm.weight"] = (net.num_heads * net.value_size,)
    else:
        name, num_channels, has_bias = "conv1d", net.num_channels, False
        shapes = dict.fromkeys(("A_log", "dt_bias"), (net.num_value_heads,))
        shapes["norm.weight"] = (net.value_size,)
    shapes[f"{name}.weight"] = num_channels, 1, net.width
    if has_bias:
        shapes[f"{name}.bias"] = (num_channels,)
    return {name: TensorSpec(shape) for name, shape in shapes.items()}


def expert_tensors(
    config: ExpertsConfig, hidden_size: int, prefix: str = "", linear_tensors: LinearTensors = plain_tensors
) -> TensorSpecs:
    """Return the tensors of the router, the experts and the shared expert of a block.

    ``prefix``: the beginning of their names.
    """
    num_experts, inner, router = config.num_experts, config.inner_size, config.router
    unquantized = [LinearShape(f"{prefix}{router.name}", num_experts, hidden_size, router.has_bias)]
    linears: list[LinearShape] = []
    if (shared := config.shared) is not None:
        mlp, size = f"{prefix}{shared.name}.", shared.inner_size
        linears += [LinearShape(f"{mlp}{name}", size, hidden_size, False) for name in ("gate_proj", "up_proj")]
        linears += [LinearShape(f"{mlp}down_proj", hidden_size, size, False)]
        if shared.gate:
            unquantized += [LinearShape(f"{prefix}{shared.gate}", 1, hidden_size, False)]
    shapes: dict[str, tuple[int, ...]] = {}
    if router.has_choice_bias:
        shapes[f"{router.name}.{CHOICE_BIAS}"] = (num_experts,)
    code_specs: TensorSpecs = {}
    if config.stored == "separate":
        gate, up, down = config.names
        for own in (f"{prefix}experts.{expert}." for expert in range(num_experts)):
            linears += [LinearShape(f"{own}{name}", inner, hidden_size, False) for name in (gate, up)]
            linears += [LinearShape(f"{own}{down}", hidden_size, inner, False)]
    else:
        gate_up, down = config.names
        if config.stored == "packed":
            joined = {gate_up: (num_experts, 2 * inner, hidden_size), down: (num_experts, hidden_size, inner)}
            for name, shape in joined.items():
                linear = LinearShape(name.removesuffix(".weight"), num_experts * shape[1], shape[2], False)
                codes = linear_tensors(replace(linear, name=f"{prefix}{linear.name}"))
                if codes["weight"].dtype:
                    code_specs |= {f"{linear.name}.{part}": spec for part, spec in codes.items()}
                else:
                    shapes[name] = shape
        else:
            shapes |= {f"{gate_up}_bias": (num_experts, 2 * inner), f"{down}_bias": (num_experts, hidden_size)}
        if config.stored == "interleaved":
            shapes |= {gate_up: (num_experts, hidden_size, 2 * inner), down: (num_experts, inner, hidden_size)}
        elif config.stored == "mxfp4":
            for name, rows, columns in ((gate_up, 2 * inner, hidden_size), (down, hidden_size, inner)):
                scales = num_experts, rows, columns // MXFP4_BLOCK
                code_specs[f"{name}_blocks"] = TensorSpec((*scales, MXFP4_BLOCK // 2), "U8", per_element=2)
                code_specs[f"{name}_scales"] = TensorSpec(scales, "U8", per_element=0)
    specs = {name: TensorSpec(shape) for name, shape in shapes.items()} | code_specs
    return _linears(unquantized, plain_tensors) | _linears(linears, linear_tensors) | _prefixed(prefix, specs)


def _draft_head(config: DraftHeadConfig, linear_tensors: LinearTensors) -> TensorSpecs:
    specs = block_tensors(config, 0, linear_tensors) | _linears([config.fc], plain_tensors)
    for name in (*config.joined_norms, config.names.norm):
        specs |= _norm(name, config.hidden_size, config.norm) if name else {}
    if config.head is not None:
        specs |= _linears([config.head], linear_tensors)
    if config.has_token_map:
        specs["d2t"] = TensorSpec((config.draft_vocab_size,), "I64", per_element=0)
    return specs


def _encoder(config: EncoderConfig, linear_tensors: LinearTensors) -> TensorSpecs:
    prefix, size, norm = config.prefix, config.hidden_size, NormConfig(kind="layer", has_bias=config.norm_bias)
    specs = {f"{prefix}{name}.weight": TensorSpec((rows, size)) for name, rows in config.embeddings.items()}
    for name in config.norms:
        specs |= _norm(f"{prefix}{name}", size, norm)
    for layer in range(config.num_layers):
        block = f"{prefix}{config.blocks}.{layer}."
        linears = [replace(linear, name=f"{block}{linear.name}") for linear in config.linears]
        specs |= _linears(linears, linear_tensors)
        for name in config.block_norms:
            if layer or name != config.first_without:
                specs |= _norm(f"{block}{name}", size, norm)
    if (head := config.head) is not None:
        dense = LinearShape(head.dense, size, size, head.dense_bias)
        specs |= _linears([dense, LinearShape(head.scores, config.num_labels, size, True)], linear_tensors)
        specs |= _norm(head.norm, size, norm) if head.norm else {}
    return specs


def _norm(name: str, size: int | tuple[int, ...], norm: NormConfig) -> TensorSpecs:
    spec = TensorSpec((size,) if isinstance(size, int) else size)
    parts = {"weight": norm.has_weight, "bias": norm.has_bias}
    return {f"{name}.{part}": spec for part, exists in parts.items() if exists}


def _linears(linears: list[LinearShape], linear_tensors: LinearTensors, *, is_transposed: bool = False) -> TensorSpecs:
    """Return the tensors of linear layers.

    ``is_transposed``: the checkpoint stores weights that are not quantized as [inputs, outputs].
    """
    specs: TensorSpecs = {}
    for linear in linears:
        for name, spec in linear_tensors(linear).items():
            is_weight = is_transposed and name == "weight" and not spec.dtype
            specs[f"{linear.name}.{name}"] = spec._replace(shape=spec.shape[::-1]) if is_weight else spec
    return specs


def _prefixed(prefix: str, specs: TensorSpecs) -> TensorSpecs:
    return {f"{prefix}{name}": spec for name, spec in specs.items()}
