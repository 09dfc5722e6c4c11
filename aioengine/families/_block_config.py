"""Configs of the parts of a decoder block, with the names of their checkpoint tensors. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from msgspec import Struct

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Supported activation names in config.json -> our names."""


FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Safetensors dtypes that are converted to the model's dtype -> bytes per element."""
DTYPE_BYTES: Final = {**FLOAT_BYTES, "I64": 8, "I32": 4, "I16": 2} | dict.fromkeys(
    ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1
)
"""All safetensors dtypes that can be read -> bytes per element."""


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: the safetensors dtype that it must have; "" for any floating-point dtype.
        per_element: parameters of the model per element. 2 for packed 4-bit values, 0 for scales.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    per_element: int = 1

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape) * self.per_element

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes in memory after loading. ``itemsize``: of the model's dtype."""
        return math.prod(self.shape) * (DTYPE_BYTES[self.dtype] if self.dtype else itemsize)


TensorSpecs = dict[str, TensorSpec]
"""Tensor name -> its description."""


class LinearShape(Struct, frozen=True):
    """Name, sizes and bias of a linear layer in the checkpoint."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool


class TensorNames(Struct, frozen=True, kw_only=True):
    """Names of the decoder's parts in the checkpoint.

    Attributes:
        positions: the table of learned positions, which are added to the token embeddings; "" if there is none.
        first_position: the row of the first position in that table.
        layers: the list of blocks.
        only_block: the prefix of the tensor names of the block of a draft head; "" for other models.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    first_position: int = 0
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    only_block: str = ""

    def block(self, layer: int) -> str:
        """Return the prefix of all tensor names of a block."""
        return self.only_block or f"{self.layers}.{layer}."


class NormConfig(Struct, frozen=True, kw_only=True):
    """A normalization layer.

    Attributes:
        kind: "rms" for RMSNorm, "layer" for LayerNorm.
        has_weight, has_bias: of a LayerNorm.
        scales_in_fp32: the RMSNorm multiplies by its weight in fp32 and rounds once. Otherwise it rounds before the
            multiplication too.
        offset: added to the checkpoint's weight. A norm with an offset always scales in fp32.
    """

    kind: Literal["rms", "layer"] = "rms"
    has_weight: bool = True
    has_bias: bool = False
    scales_in_fp32: bool = False
    offset: float = 0.0


class BlockConfig(Struct, frozen=True, kw_only=True):
    """How a block connects attention and MLP.

    Attributes:
        attention, mlp: prefixes of their tensor names.
        attention_norm, mlp_norm: names of the norms of their inputs; "" if there is none.
        attention_output_norm, mlp_output_norm: names of the norms of their outputs; "" if there is none.
        is_parallel: attention and MLP read the same residual stream, and the block adds both outputs. Without
            ``mlp_norm``, the MLP reads the output of ``attention_norm``. There is no ``mlp_output_norm``.
    """

    attention: str = "self_attn."
    mlp: str = "mlp."
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    is_parallel: bool = False

    @property
    def norms(self) -> list[str]:
        """The names of the norms that exist."""
        names = self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm
        return [name for name in names if name]


class HeadNorm(Struct, frozen=True, kw_only=True):
    """Norms of queries and keys, applied before the rotary embedding.

    Attributes:
        names: of the query norm and the key norm.
        extent: "head" norms each head with one shared weight. "each_head" norms each head with its own weight, stored
            in one tensor; "list" stores these weights in numbered tensors. "all_heads" norms all heads together.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    norm: NormConfig = NormConfig()
    extent: Literal["head", "each_head", "list", "all_heads"] = "head"

    def parts(self, name: str, num_heads: int) -> list[str]:
        """Return the checkpoint names of a norm: ``name``, or one name per head."""
        return [f"{name}.norms.{head}" for head in range(num_heads)] if self.extent == "list" else [name]

    def shape(self, num_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the shape of each tensor."""
        if self.extent == "each_head":
            return (num_heads, head_size)
        return (head_size * num_heads if self.extent == "all_heads" else head_size,)


class LatentConfig(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (arXiv 2405.04434): the KV cache holds one latent vector per token for all heads.

    Attributes:
        rank: size of the latent vector, without its rotary part.
        query_rank: size of the low-rank query vector; None if queries are projected from the residual stream.
        plain_size, rotated_size: sizes of the parts of a query head without and with rotary embedding.
        value_size: size of a value head.
    """

    rank: int
    query_rank: int | None
    plain_size: int
    rotated_size: int
    value_size: int


class AttentionConfig(Struct, frozen=True, kw_only=True):
    """Self-attention.

    Attributes:
        qkv: names of the projections of queries, keys and values, or the name of one fused projection.
        is_grouped: the fused projection orders its outputs by KV head: queries, key and value of the first KV head,
            then of the next. Otherwise all queries come first, then all keys, then all values.
        output: name of the output projection.
        scale: factor of the attention scores; None for 1 / sqrt(head size).
        soft_cap: see ``AttentionShape``.
        clip: queries, keys and values are clipped to [-clip, clip]; None for no clipping.
        is_interleaved: the rotary embedding rotates neighbouring entries as a pair. Otherwise entry i of the first
            half pairs with entry i of the second half.
        latent: latent attention; None for keys and values per head. With latent attention ``qkv`` is unused, and
            ``qkv_bias`` belongs to the layers that read the residual stream.
        has_sinks: each head has a learned attention sink, see ``AttentionShape``.
        has_output_gate: the query projection also outputs a gate after each head. The sigmoid of the gate multiplies
            the head's attention output.
        num_inputs: joined vectors of the hidden size that the projections of queries, keys and values read.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    is_grouped: bool = False
    output: str = "o_proj"
    qkv_bias: bool = False
    output_bias: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    clip: float | None = None
    is_interleaved: bool = False
    head_norm: HeadNorm | None = None
    latent: LatentConfig | None = None
    has_sinks: bool = False
    has_output_gate: bool = False
    num_inputs: int = 1


class ShortConvConfig(Struct, frozen=True, kw_only=True):
    """Short gated convolutions, which replace attention in some layers.

    Attributes:
        layers: indices of the layers with a convolution.
        width: tokens that the convolution covers.
        has_bias: the convolution and its linear layers have biases.
        prefix: of the tensor names.
    """

    layers: frozenset[int]
    width: int
    has_bias: bool
    prefix: str = "conv."


class MambaConfig(Struct, frozen=True, kw_only=True):
    """Mamba 2 layers, which replace attention in some layers. The gated norm normalizes all heads together.

    Attributes:
        layers: indices of the Mamba 2 layers.
        num_groups: groups of heads that share keys and queries (B and C in the paper) of size ``key_size``.
        value_size: size of a head.
        width: tokens that the convolution covers.
        has_conv_bias: the convolution has a bias.
        has_bias: the linear layers have biases.
        time_limits: minimum and maximum of the time step.
        epsilon: of the norm.
        prefix: of the tensor names.
    """

    layers: frozenset[int]
    num_heads: int
    num_groups: int
    value_size: int
    key_size: int
    width: int
    has_conv_bias: bool
    has_bias: bool
    time_limits: tuple[float, float]
    epsilon: float
    prefix: str = "mamba."

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return self.num_heads * self.value_size + 2 * self.num_groups * self.key_size

    @property
    def num_inputs(self) -> int:
        """Output size of the input projection: gates, channels, and one time step per head."""
        return self.num_heads * self.value_size + self.num_channels + self.num_heads


class DeltaNetConfig(Struct, frozen=True, kw_only=True):
    """Gated delta nets, which replace attention in some layers.

    Attributes:
        layers: indices of the delta net layers.
        width: tokens that the convolution covers.
        prefix: of the tensor names.
        is_grouped: there are two input projections, and they order their outputs by key head. Otherwise there are four.
    """

    layers: frozenset[int]
    num_value_heads: int
    num_key_heads: int
    value_size: int
    key_size: int
    width: int
    prefix: str = "linear_attn."
    is_grouped: bool = True

    @property
    def inputs(self) -> dict[str, int]:
        """Names and output sizes of the input projections.

        Together they output queries, keys, values, output gates, and per value head the inputs of beta and of the decay
        (scores and steps in ``DeltaGates``).
        """
        num_heads, values = self.num_value_heads, self.num_value_heads * self.value_size
        if self.is_grouped:
            return {"in_proj_qkvz": self.num_channels + values, "in_proj_ba": 2 * num_heads}
        return {
            "in_proj_qkv": self.num_channels,
            "in_proj_z": values,
            "in_proj_b": num_heads,
            "in_proj_a": num_heads,
        }

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries and keys of the key heads, values of the value heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size


class MlpConfig(Struct, frozen=True, kw_only=True):
    """An MLP: second(activation(first(x))), or, if it is gated, second(activation(gate(x)) * up(x)).

    Attributes:
        first: names of the layers that read the input: one layer, or gate and up. A gated MLP with one name has a
            fused layer whose first half is the gate.
        second: name of the output layer.
    """

    first: tuple[str, ...] = ("gate_proj", "up_proj")
    second: str = "down_proj"
    is_gated: bool = True
    activation: Activation = "silu"
    has_bias: bool = False
