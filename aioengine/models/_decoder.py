"""The decoder that most families share: pre-norm blocks of attention and a gated MLP, rotary positions.

A family's file says how its config.json is read (``Config``) and what of ``DecoderConfig`` it comes to.
T tokens, D model size, V vocabulary, S sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

import msgspec
import torch

from aioengine.attention._base import AttentionShape
from aioengine.layers.attention import SelfAttention
from aioengine.layers.embedding import Embedding
from aioengine.layers.linear import Linear
from aioengine.layers.mlp import GatedMLP
from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Placement
from aioengine.layers.rope import RopeConfig, RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.attention._base import AttentionBackend
    from aioengine.kernels.linear import Product
    from aioengine.models._base import ModelOptions

ConfigType = TypeVar("ConfigType", bound=msgspec.Struct)


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config comes to. ``head_norm``: epsilon of the norm over query and key heads, None for none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    tied: bool
    max_position_embeddings: int
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: float | None = None


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that all families have; what they do not name has no influence on the results.

    A value that the code does not implement raises ValueError when it is read, so it is refused and not ignored.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    layer_types: list[Literal["full_attention"]] | None = None
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.partial_rotary_factor != 1.0:
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, "1.0")
        if self.num_attention_heads % self.num_kv_heads:
            not_implemented("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_attention_heads} heads")
        if self.head_size % 2:
            not_implemented("head_dim", self.head_size, "an even number")

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def decoder(self, rope: RopeConfig) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            epsilon=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            max_position_embeddings=self.max_position_embeddings,
            rope=rope,
        )


def not_implemented(field: str, value: object, implemented: str) -> NoReturn:
    message = f"{field} {value!r} is not implemented; what works: {implemented}"
    raise ValueError(message)


def decode_config(raw: Mapping[str, object], config_type: type[ConfigType]) -> ConfigType:
    """Read config.json, or an object in it, into a Struct.

    Raises:
        ValueError: a field is missing, of another type, or has a value that is not implemented; it is named.
    """
    if raw.get("quantization_config") is not None:
        not_implemented("quantization_config", raw["quantization_config"], "checkpoints that are not quantized")
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        message = f"config.json of model_type {raw.get('model_type')!r}: {error}"
        raise ValueError(message) from error


def read_rope(raw: Mapping[str, object]) -> RopeConfig:
    """``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` where config.json is of an older kind.

    Raises:
        ValueError: a scaling that is not implemented.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        message = f"rope_parameters {given!r} in config.json is not an object"
        raise ValueError(message)
    fields: dict[str, object] = {"rope_theta": raw.get("rope_theta") or RopeConfig().rope_theta}
    fields |= {"rope_type": given.get("type", "default"), **given}
    return decode_config({**fields, "model_type": raw.get("model_type")}, RopeConfig)


@dataclass(frozen=True, slots=True)
class _Step:
    """What all blocks of a step share."""

    tables: tuple[Tensor, Tensor]
    attention: AttentionBackend


class _Block:
    def __init__(self, config: DecoderConfig, shape: AttentionShape, placement: Placement) -> None:
        self._attention_norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._attention = SelfAttention(
            config.hidden_size,
            shape,
            placement,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            head_norm=config.head_norm,
        )
        self._mlp_norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._mlp = GatedMLP(config.hidden_size, config.intermediate_size, placement, bias=config.mlp_bias)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return (
            self._attention_norm.weights(f"{prefix}input_layernorm")
            | self._attention.weights(f"{prefix}self_attn.")
            | self._mlp_norm.weights(f"{prefix}post_attention_layernorm")
            | self._mlp.weights(f"{prefix}mlp.")
        )

    def finish_loading(self) -> None:
        self._attention.finish_loading()
        self._mlp.finish_loading()

    def __call__(
        self, x: Tensor, delta: Tensor | None, step: _Step, layer: int, *, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``x``: the residual stream, changed in place. ``delta``: what the block before gave, which x still lacks.
        ``wanted``: the tokens that anything comes after; None: all.

        Returns the stream and what is to be added to it next.
        """
        normed = self._attention_norm(x) if delta is None else self._attention_norm.after(delta, x)
        attended = self._attention(normed, step.tables, step.attention, layer, wanted=wanted)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return x, self._mlp(self._mlp_norm.after(attended, x))


class Decoder:
    """See ``models._base.Model``; families subclass it only to read their config."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        placement = Placement(dtype=options.dtype, device=options.device, batch_invariant=options.batch_invariant)
        self.attention_shape = AttentionShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
        )
        self.dtype = options.dtype
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self._embedding = Embedding(config.vocab_size, config.hidden_size, placement)
        self._rotary = RotaryEmbedding(
            config.rope,
            config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            num_positions=options.max_positions,
            device=options.device,
        )
        self._blocks = [_Block(config, self.attention_shape, placement) for _ in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.epsilon, placement)
        self._head = None if config.tied else Linear(config.hidden_size, {"lm_head": config.vocab_size}, placement)
        self._logits: Product | None = self._head

    def weights(self) -> dict[str, Tensor]:
        found = self._embedding.weights("model.embed_tokens") | self._norm.weights("model.norm")
        for index, block in enumerate(self._blocks):
            found |= block.weights(f"model.layers.{index}.")
        return found if self._head is None else found | self._head.weights("")

    def is_ignored(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (self._head is None and name == "lm_head.weight")

    def finish_loading(self) -> None:
        for block in self._blocks:
            block.finish_loading()
        if self._head is None:
            self._logits = self._embedding.as_head()
        else:
            self._head.finish_loading()

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        step = _Step(self._rotary.tables(positions), attention)
        x = self._embedding(input_ids)
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            is_last = layer == len(self._blocks) - 1
            x, delta = block(x, delta, step, layer, wanted=wanted if is_last else None)
        return self._norm(x) if delta is None else self._norm.after(delta, x)

    def forward_block(self, num_tokens: int, attention: AttentionBackend) -> None:
        x = self._norm.weight.new_zeros(num_tokens, self.hidden_size)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=x.device)
        self._blocks[0](x, None, _Step(self._rotary.tables(positions), attention), 0, wanted=None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self._logits is not None, "finish_loading was not called"
        return self._logits(hidden)
