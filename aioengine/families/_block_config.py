"""The parts of a decoder's block, with the names of their tensors in the checkpoint. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""The activations of config.json that are implemented."""


class TensorNames(Struct, frozen=True, kw_only=True):
    """Names in the checkpoint of the parts of a decoder.

    Attributes:
        positions: of learned positions, which are added to the embeddings; "": there are none. Rows before
            ``first_position`` are not used.
        layers: of the list of its blocks.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    first_position: int = 0
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"

    def block(self, layer: int) -> str:
        """What all names of this block begin with."""
        return f"{self.layers}.{layer}."


class NormConfig(Struct, frozen=True, kw_only=True):
    """The norms of a model.

    Attributes:
        kind: "rms", or "layer", which takes the mean away.
        has_weight: whether a "layer" norm has a weight. has_bias: whether it has a bias.
        is_wide: an "rms" norm is multiplied by its weight in fp32, and rounded once; else rounded before as well.
        offset: added to the weight of the checkpoint; such a norm is wide.
    """

    kind: Literal["rms", "layer"] = "rms"
    has_weight: bool = True
    has_bias: bool = False
    is_wide: bool = False
    offset: float = 0.0


class BlockConfig(Struct, frozen=True, kw_only=True):
    """How attention and MLP are connected. Each may have a norm before it and one behind it; "": there is none.

    Attributes:
        attention, mlp: what the names of their tensors begin with.
        is_parallel: both read the stream as it was before the block. Without a norm of its own the MLP then reads what
            attention reads. There is no norm behind the MLP.
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
        """The names of those that there are."""
        found = self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm
        return [name for name in found if name]


class HeadNorm(Struct, frozen=True, kw_only=True):
    """Norms of queries and keys, before they are rotated.

    Attributes:
        extent: "head": of each head, with one weight for all heads; "each_head": with a weight for each head, in one
            tensor; "list": the same in numbered tensors; "all_heads": one norm over all heads together.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    norm: NormConfig = NormConfig()
    extent: Literal["head", "each_head", "list", "all_heads"] = "head"

    def parts(self, name: str, num_heads: int) -> list[str]:
        """The names of the norms in the checkpoint, of ``names``: one, or one for each head."""
        return [f"{name}.norms.{head}" for head in range(num_heads)] if self.extent == "list" else [name]

    def shape(self, num_heads: int, head_size: int) -> tuple[int, ...]:
        """Of each tensor."""
        if self.extent == "each_head":
            return (num_heads, head_size)
        return (head_size * num_heads if self.extent == "all_heads" else head_size,)


class LatentConfig(Struct, frozen=True, kw_only=True):
    """Latent attention (arXiv 2405.04434): of each token one vector is kept, for the keys and values of all heads.

    Attributes:
        rank: its size, without the numbers that are rotated.
        query_rank: size of the vector that the queries of a token are made of; None: they are made of the stream.
        plain_size, rotated_size: numbers of a query head that are not rotated, and that are.
        value_size: of a head.
    """

    rank: int
    query_rank: int | None
    plain_size: int
    rotated_size: int
    value_size: int


class AttentionConfig(Struct, frozen=True, kw_only=True):
    """Self-attention.

    Attributes:
        qkv: the layers of queries, keys and values, or one layer of all.
        is_grouped: one layer of all has for each KV head its queries, its key and its value; else all queries, all keys
            and all values.
        scale: multiplies the dot products of queries and keys; None: 1 / sqrt(head size).
        soft_cap: as in ``AttentionShape``.
        clip: queries, keys and values are kept within -clip and clip; None: they stay.
        is_interleaved: the rotation pairs neighbours; else the first half of what is rotated with the second.
        latent: None: keys and values are kept. Otherwise ``qkv`` means nothing, and ``qkv_bias`` is of the layers that
            read the stream.
        has_sinks: whether each head has a learned sink, see ``AttentionShape``.
        has_output_gate: the layer of queries has behind each head a gate of as many numbers, whose sigmoid multiplies
            what the head has attended to.
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


class ShortConvConfig(Struct, frozen=True, kw_only=True):
    """Gated convolutions over a few tokens in the place of attention.

    Attributes:
        layers: those that have one.
        prefix: of the names of their tensors.
        width: tokens of the convolution.
        has_bias: of its linear layers and of the convolution.
    """

    layers: frozenset[int]
    width: int
    has_bias: bool
    prefix: str = "conv."


class MambaConfig(Struct, frozen=True, kw_only=True):
    """Layers of Mamba 2 in the place of attention, with one group of heads for the norm.

    Attributes:
        layers: those that are one.
        num_groups: of heads that share keys and queries (B and C in the paper), of ``key_size`` numbers each.
        value_size: numbers of a head.
        width: tokens of the convolution. has_conv_bias: of the convolution. has_bias: of the linear layers.
        time_limits: of the time step.
        epsilon: of the norm.
        prefix: of the names of their tensors.
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
        """Of the convolution."""
        return self.num_heads * self.value_size + 2 * self.num_groups * self.key_size

    @property
    def num_inputs(self) -> int:
        """Outputs of the layer that reads the stream: gates, the channels, and a time step for each head."""
        return self.num_heads * self.value_size + self.num_channels + self.num_heads


class DeltaNetConfig(Struct, frozen=True, kw_only=True):
    """Gated delta nets in the place of attention.

    Attributes:
        layers: those that have one.
        prefix: of the names of their tensors.
        width: tokens of the convolution.
        is_grouped: two layers read the stream, with the outputs of a key head and of its value heads together; else
            four layers do.
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
        """The layers that read the stream, by name, with the size of their outputs: q, k and v, the gates of outputs,
        and for each value head a score and a step.
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
        """Of the convolution: q and k of the key heads, v of the value heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size


class MlpConfig(Struct, frozen=True, kw_only=True):
    """second(activation(first(x))), or where gated: second(activation(gates) * others).

    Attributes:
        first: a layer, or those of the gates and of what they gate, which may also be one layer, gates first.
    """

    first: tuple[str, ...] = ("gate_proj", "up_proj")
    second: str = "down_proj"
    is_gated: bool = True
    activation: Activation = "silu"
    has_bias: bool = False
