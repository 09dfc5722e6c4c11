"""Configs of models, and the base classes of the families that read them from config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import (
    ACTIVATIONS,
    AttentionConfig,
    BlockConfig,
    DeltaNetConfig,
    LinearShape,
    MambaConfig,
    MlpConfig,
    NormConfig,
    ShortConvConfig,
    TensorNames,
)
from aioengine.families._experts import ExpertsConfig
from aioengine.families._fields import ConfigType, check_sizes, decode_config, file_names, not_implemented
from aioengine.families._rope_config import RopeConfig, read_rope

_MAX_LABELS: Final = 2**20

Renamed = tuple[tuple[str, str], ...]


def new_name(name: str, renamed: Renamed) -> str:
    """Replace the prefix of a name by the first match in ``renamed``, see ``TransformerConfig``."""
    for old, new in renamed:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


class Task(StrEnum):
    """The task of a model. It decides which requests the engine serves."""

    GENERATE = "generate"  # outputs the next token
    EMBED = "embed"  # outputs hidden states, which are pooled into a vector
    CLASSIFY = "classify"  # outputs one score per class


class TransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The task and sizes of a model.

    Attributes:
        epsilon: of the norms.
        max_position_embeddings: trained context length, before any RoPE scaling.
        num_labels: scores of a classifier.
        is_causal: tokens attend to earlier positions only.
        windows: the sliding window of each layer in tokens, including the token itself; None for a layer without a
            window. In a model that is not causal, the number of tokens on either side. Empty if no layer has a window.
        keeps_states: some layers keep a recurrent state per request. Prefixes are reused only up to a snapshot of it.
        prefix: of the tensor names of blocks and embeddings. Checkpoints of models without a head may omit it.
        renamed: (prefix in the checkpoint, prefix in our names) pairs. The first match applies.
    """

    task: Task
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    max_position_embeddings: int
    num_labels: int = 0
    is_causal: bool = True
    windows: tuple[int | None, ...] = ()
    keeps_states: bool = False
    prefix: str = "model."
    renamed: Renamed = ()
    rope: RopeConfig = RopeConfig()

    @property
    def short_length(self) -> int:
        """With LongRoPE, the number of tokens above which a request uses the long factors; 0 without LongRoPE."""
        return 0


class DecoderConfig(TransformerConfig, frozen=True, kw_only=True):
    """A decoder-only model.

    Attributes:
        tied: the output head shares the weight of the embedding.
        is_transposed: the checkpoint stores weights of linear layers as [inputs, outputs].
        layer_ropes: the rotary embedding of each layer, None for a layer without one. Empty if all layers use ``rope``.
        rope_size: the size of the rotary tables if it is not the head size, else 0.
        embedding_scale: factor of the token embeddings, rounded to the dtype of the model.
        stream_scale: factor of the inputs of the first block: token embeddings, or embeddings given by the caller.
        logits_scale: factor of the logits.
        logits_cap: logits become cap * tanh(logits / cap); None for no cap.
        head_bias: the output head has a bias.
        ignored: prefixes of checkpoint tensors that the model does not load.
        buffers: suffixes of checkpoint tensors that are buffers, not weights.
        experts: the experts of the layers that have no MLP; None if all layers have an MLP.
    """

    tied: bool
    names: TensorNames = TensorNames()
    block: BlockConfig = BlockConfig()
    attention: AttentionConfig = AttentionConfig()
    delta_net: DeltaNetConfig | None = None
    short_conv: ShortConvConfig | None = None
    mamba: MambaConfig | None = None
    mlp: MlpConfig = MlpConfig()
    norm: NormConfig = NormConfig()
    is_transposed: bool = False
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    rope_size: int = 0
    embedding_scale: float = 1.0
    stream_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    head_bias: bool = False
    ignored: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if (self.experts or self.delta_net or self.mamba) and self.mlp.activation != "silu":
            not_implemented("hidden_act", self.mlp.activation, "silu in a model with experts, delta nets or Mamba")
        if self.tied and self.head_bias and self.task is Task.GENERATE:
            not_implemented("tie_word_embeddings", True, "false in a model whose head has a bias")
        if self.experts is not None:
            self.experts.check()
        attention = self.attention
        is_plain = attention.latent is None and attention.soft_cap is None and not attention.has_sinks
        if not self.is_causal and not (is_plain and self.stateful is None and not any(self.windows)):
            not_implemented("is_causal", False, "true with windows, soft caps, sinks, states or latent attention")

    @property
    def short_length(self) -> int:
        ropes = self.layer_ropes or (self.rope,)
        return max(
            rope.original_max_position_embeddings or self.max_position_embeddings
            if rope is not None and rope.rope_type == "longrope"
            else 0
            for rope in ropes
        )

    def keeps_state(self, layer: int) -> bool:
        """Return whether a layer keeps a recurrent state instead of keys and values."""
        return (net := self.stateful) is not None and layer in net.layers

    @property
    def stateful(self) -> DeltaNetConfig | ShortConvConfig | MambaConfig | None:
        """The config of the layers with a recurrent state; None if there are none."""
        return self.delta_net or self.short_conv or self.mamba

    def mixer_prefix(self, layer: int) -> str:
        """Return the prefix of the tensor names of a layer's attention, or of the layer that replaces it."""
        net = self.stateful
        return net.prefix if net is not None and layer in net.layers else self.block.attention

    @property
    def attention_layers(self) -> list[int]:
        """The layers with keys and values."""
        return [layer for layer in range(self.num_layers) if not self.keeps_state(layer)]

    def layers_like(self, layer: int) -> list[int]:
        """Return the layers of the same kind: with a recurrent state, or with keys and values."""
        return [other for other in range(self.num_layers) if self.keeps_state(other) == self.keeps_state(layer)]

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a layer; None if it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer; None if it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def head(self) -> LinearShape | None:
        """The output head; None if the model has no head of its own."""
        if self.task is Task.CLASSIFY:
            return LinearShape("score", self.num_labels, self.hidden_size, False)
        if self.tied or self.task is Task.EMBED:
            return None
        return LinearShape(self.names.head, self.vocab_size, self.hidden_size, self.head_bias)


def as_embedder(raw: Mapping[str, object]) -> dict[str, object]:
    """Return config.json of the same model without its head."""
    return {**raw, "architectures": ["Model"]}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json with the task and the number of classes.

    Attributes:
        tasks: suffix of the name in ``architectures`` -> task. The first match applies.
    """

    tasks: ClassVar[Mapping[str, Task]] = {
        "ForCausalLM": Task.GENERATE,
        "ForSequenceClassification": Task.CLASSIFY,
        "Model": Task.EMBED,
    }

    architectures: list[str] | None = None
    id2label: dict[int | str, object] | None = None
    num_labels: int | None = None

    @property
    def task(self) -> Task:
        """The task of the first architecture, or the first of ``tasks`` without one.

        Raises ValueError if the architecture is not implemented.
        """
        if not self.architectures:
            return next(iter(self.tasks.values()))
        task = next((task for end, task in self.tasks.items() if self.architectures[0].endswith(end)), None)
        if task is None:
            not_implemented("architectures", self.architectures, ", ".join(f"...{end}" for end in self.tasks))
        return task

    @property
    def num_scores(self) -> int:
        """The scores of a classifier: the number of labels in ``id2label``, or else ``num_labels``, or else 2.

        0 for other tasks. Raises ValueError if it is out of range.
        """
        if self.task is not Task.CLASSIFY:
            return 0
        num_labels = 2 if self.num_labels is None else self.num_labels
        num_scores = num_labels if self.id2label is None else len(self.id2label)
        if not 1 <= num_scores <= _MAX_LABELS:
            not_implemented("num_labels", num_scores, f"1 to {_MAX_LABELS}")
        return num_scores


class TextFamily(Family, frozen=True, kw_only=True):
    """The fields of config.json that decoders and encoders share."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int

    def config(self, config_type: type[ConfigType], **values: object) -> ConfigType:
        """Return a config of ``values``, and of the attributes of the family that have the name of a field."""
        names = config_type.__struct_fields__
        attributes = {name: getattr(self, name) for name in names if hasattr(type(self), name)}
        attributes |= {"num_layers": self.num_hidden_layers, "num_heads": self.num_attention_heads}
        return config_type(**{**attributes, "num_labels": self.num_scores, **values})

    def check_length(self, field: str, values: Sequence[object] | None) -> None:
        """Raise ValueError if the list in a field does not have one entry per layer."""
        if values is not None and len(values) != self.num_hidden_layers:
            not_implemented(field, f"of length {len(values)}", f"one entry per layer ({self.num_hidden_layers})")


class DecoderFamily(TextFamily, frozen=True, kw_only=True):
    """The fields of config.json that all families of decoders share.

    A family adds its own fields. Fields that do not change results are left out. It describes the model with class
    variables, properties and fields that have the names of fields of ``DecoderConfig``. Raises ValueError for a value
    that is not implemented.

    Attributes:
        default_partial: default of ``partial_rotary_factor``; None if the family always rotates whole heads.
        default_theta: default of ``rope_theta``.
        attention, mlp: without biases and activation, which come from ``hidden_act`` and the next attributes.
        attention_bias, qkv_bias, output_bias, mlp_bias: the linear layers that have biases. ``mlp_bias`` None: as
            ``attention_bias``.
        experts: without sizes, see ``ExpertsConfig.sized``.
        sliding_window, use_sliding_window: the sliding window in tokens, and whether layers have it.
        sliding_window_pattern: without ``layer_types``, every n-th layer has full attention; 0 for none.
        has_one_window: all layers have the sliding window, or none has.
        unread: fields that this family ignores.
        limits: field -> smallest and largest value, see ``check_sizes``.
    """

    default_partial: ClassVar[float | None] = None
    default_theta: ClassVar[float] = 10_000.0
    norm: ClassVar[NormConfig] = NormConfig()
    block: ClassVar[BlockConfig] = BlockConfig()
    attention: ClassVar[AttentionConfig] = AttentionConfig()
    mlp: ClassVar[MlpConfig] = MlpConfig()
    attention_bias: ClassVar[bool | None] = False
    qkv_bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool | None] = False
    experts: ClassVar[ExpertsConfig | None] = None
    sliding_window: ClassVar[int | None] = None
    use_sliding_window: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 0
    has_one_window: ClassVar[bool] = False
    rope_size: ClassVar[int] = 0
    unread: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[Mapping[str, tuple[int, int]]] = {}

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    partial_rotary_factor: float | None = None
    rope_theta: float | None = None
    rope_scaling: Mapping[str, object] | None = None
    rope_parameters: Mapping[str, object] | None = None
    is_causal: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, self.limits)
        if self.hidden_act not in ACTIVATIONS:
            not_implemented(file_names(self)["hidden_act"], self.hidden_act, ", ".join(ACTIVATIONS))
        if self.default_partial is None and self.partial_rotary_factor not in (None, 1.0):
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, "1.0")
        if not 0 < self.rms_norm_eps <= 1:
            not_implemented(file_names(self)["rms_norm_eps"], self.rms_norm_eps, "more than 0, at most 1")
        if self.num_attention_heads % self.num_kv_heads:
            divisor = f"a divisor of num_attention_heads ({self.num_attention_heads})"
            not_implemented("num_key_value_heads", self.num_kv_heads, divisor)
        if self.head_size % 2 or not self.head_size:
            not_implemented("head_dim", self.head_size, "an even number")
        if self.window is not None and self.window < 1:
            not_implemented("sliding_window", self.window, "at least 1, or null")
        self.check_length("layer_types", self.layer_types)
        if self.has_one_window and self.window is not None and "full_attention" in (self.layer_types or ()):
            not_implemented("layer_types", self.layer_types, "only sliding_attention if sliding_window is set")
        if self.window is None and "sliding_attention" in (self.layer_types or ()):
            not_implemented("layer_types", self.layer_types, "only full_attention without a sliding window")

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. Raises ValueError for a value that is not implemented."""
        return decode_config({name: config[name] for name in config if name not in cls.unread}, cls).decoder()

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """The sliding window in tokens; None if no layer has one."""
        return self.sliding_window if self.use_sliding_window else None

    def has_window(self, layer: int) -> bool:
        """Return whether a layer has the sliding window by default, without ``layer_types``."""
        return not self.sliding_window_pattern or (layer + 1) % self.sliding_window_pattern != 0

    @property
    def layer_kinds(self) -> Sequence[str]:
        """``layer_types``, or its default."""
        if self.layer_types is not None:
            return self.layer_types
        have_window = [self.has_one_window or self.has_window(layer) for layer in range(self.num_hidden_layers)]
        return ["sliding_attention" if has_window else "full_attention" for has_window in have_window]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See ``TransformerConfig``."""
        if self.window is None:
            return ()
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.layer_kinds)

    @property
    def rotation(self) -> Mapping[str, object]:
        """``rope_parameters``, which older files name ``rope_scaling``."""
        return self.rope_scaling or self.rope_parameters or {}

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding."""
        return read_rope(
            self.rotation,
            self.default_theta if self.rope_theta is None else self.rope_theta,
            partial=self.default_partial if self.partial_rotary_factor is None else self.partial_rotary_factor,
            original=self.original_max_position_embeddings,
        )

    def sized_experts(self) -> ExpertsConfig | None:
        """Return ``experts`` with the sizes in the file; None without experts."""
        return None if self.experts is None else self.experts.sized(msgspec.structs.asdict(self))

    def decoder(self) -> DecoderConfig:
        """Return the decoder. Families replace parts that depend on further fields.

        Raises ValueError if the rotary embedding does not fit the head size.
        """
        rope = self.rope
        rope.check_head(self.rope_size or self.head_size)
        qkv_bias, output_bias = self.attention_bias or self.qkv_bias, self.attention_bias or self.output_bias
        mlp_bias = bool(self.attention_bias if self.mlp_bias is None else self.mlp_bias)
        return self.config(
            DecoderConfig,
            rope=rope,
            epsilon=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            attention=replace(self.attention, qkv_bias=qkv_bias, output_bias=output_bias),
            mlp=replace(self.mlp, activation=ACTIVATIONS[self.hidden_act], has_bias=mlp_bias),
            experts=self.sized_experts(),
        )
