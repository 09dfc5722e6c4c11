"""The fields of config.json that most families share, checked, and the decoder that they describe. No torch."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final, Literal, NoReturn, TypeVar

import msgspec

from aioengine.checks import cut, shown
from aioengine.families._block_config import (
    ACTIVATIONS,
    AttentionConfig,
    BlockConfig,
    DeltaNetConfig,
    MambaConfig,
    MlpConfig,
    NormConfig,
    ShortConvConfig,
    TensorNames,
)
from aioengine.families._experts import ExpertsConfig

ConfigType = TypeVar("ConfigType", bound=msgspec.Struct)

MAX_SIZES: Final = {
    "max_position_embeddings": 2**31 - 1,
    "vocab_size": 2**27,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "kv_lora_rank": 2**14,
    "q_lora_rank": 2**20,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "experts_per_token": 2**14,
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
    "num_nextn_predict_layers": 2**14,
    "num_mtp_layers": 2**14,
    "num_shared_experts": 2**14,
}
"""Far beyond all models: a larger value is a mistake, which would cost hours and memory before it is noticed."""

_MAY_BE_ZERO: Final = (
    "num_experts",
    "num_local_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_shared_experts",
)
"""Of ``MAX_SIZES``; a model with no experts is dense, and ``check_experts`` is for others."""
_MIN_FACTOR, _MAX_FACTOR = 1e-6, 1e6

_POSITIVE: Final = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_MIN_POSITIVE, _MAX_POSITIVE = 1e-9, 1e12
"""Range of the numbers of ``_POSITIVE``; all angles are finite with them."""

_OF_ORIGINAL: Final = ("llama3", "yarn", "longrope")
_MAX_LABELS: Final = 2**20
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class Task(StrEnum):
    """The use that a model was trained for, which decides which requests it serves."""

    GENERATE = "generate"  # its output is the next token
    EMBED = "embed"  # its output is hidden states, which are pooled into a vector
    CLASSIFY = "classify"  # its output is a score for each class


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``rope_parameters`` of config.json, or ``rope_theta`` and ``rope_scaling`` of older ones.

    Attributes:
        short_factor, long_factor: of "longrope", what divides each frequency: in a context of up to
            ``original_max_position_embeddings``, and in a longer one.
        mrope_section: where positions have three axes (time, height, width), how many of the pairs of numbers of a head
            are rotated by each. mrope_interleaved: the axes take turns, else their pairs follow one another.
    """

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1:
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, "more than 0, at most 1")
        given = msgspec.structs.asdict(self)
        for field in _NEEDED.get(self.rope_type, ()):
            if given[field] is None:
                message = f"rope_parameters.{field} is missing in config.json; rope_type {self.rope_type!r} needs it"
                raise ValueError(message)
        for field in _POSITIVE:
            if given[field] is not None and not _MIN_POSITIVE <= given[field] <= _MAX_POSITIVE:
                not_implemented(f"rope_parameters.{field}", given[field], f"{_MIN_POSITIVE:g} to {_MAX_POSITIVE:g}")
        if self.rope_type == "yarn":
            self._check_yarn()
        for field, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if any(not _MIN_POSITIVE <= factor <= _MAX_POSITIVE for factor in factors or ()):
                not_implemented(f"rope_parameters.{field}", factors, f"{_MIN_POSITIVE:g} to {_MAX_POSITIVE:g}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and high <= low:
            not_implemented("rope_parameters.high_freq_factor", high, f"more than low_freq_factor, which is {low}")

    def rotary_size(self, head_size: int) -> int:
        """The first numbers of a head that are rotated."""
        return int(head_size * self.partial_rotary_factor)

    def check_head(self, head_size: int) -> None:
        """Raise ValueError where heads of this size cannot be rotated so."""
        size = self.rotary_size(head_size)
        if self.rope_type == "dynamic" and size < 4:
            not_implemented("head_dim", head_size, "at least 4 rotated numbers with rope_type 'dynamic'")
        if size % 2 or not size:
            not_implemented(
                "partial_rotary_factor", self.partial_rotary_factor, f"an even part of heads of {head_size}"
            )
        for field, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if self.rope_type == "longrope" and len(factors or ()) != size // 2:
                not_implemented(f"rope_parameters.{field}", f"of {len(factors or ())} numbers", f"{size // 2}")

    def _check_yarn(self) -> None:
        if self.factor is not None and self.factor < 1:
            not_implemented("rope_parameters.factor", self.factor, "at least 1 with rope_type 'yarn'")
        if self.rope_theta <= 1:
            not_implemented("rope_parameters.rope_theta", self.rope_theta, "more than 1 with rope_type 'yarn'")
        for field, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None and not 0 <= value <= _MAX_POSITIVE:
                not_implemented(f"rope_parameters.{field}", value, f"0 to {_MAX_POSITIVE:g}")


class TransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about any model: its task and its sizes.

    Attributes:
        epsilon: of the norms.
        max_position_embeddings: positions that the model was made for, before any rope scaling.
        num_labels: scores of a model that classifies.
        is_causal: a token attends to no later position.
        windows: for each layer, the number of positions that a token attends to, itself and those before it; where not
            causal, how far it attends to either side. None: no limit. Empty: so in all layers.
        keeps_states: layers keep a state of fixed size for each request, which is known behind its last token alone, so
            that prefixes are reused up to a snapshot of it.
        prefix: of the names of the tensors of the blocks and the embedding, which some checkpoints leave out.
        renamed: prefixes of names in checkpoints, and what stands for them; the first that fits counts.
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
    renamed: tuple[tuple[str, str], ...] = ()
    rope: RopeConfig = RopeConfig()

    @property
    def short_length(self) -> int:
        """Texts of more tokens have other rotations (longrope); 0: all have the same ones."""
        return 0


class DecoderConfig(TransformerConfig, frozen=True, kw_only=True):
    """A decoder: what its blocks are made of, and what is before and behind them.

    Attributes:
        tied: whether the output head is the embedding.
        is_transposed: the weights of linear layers in the checkpoint are [inputs, outputs].
        layer_ropes: for each layer its rotary embedding; None: it has none. Empty: ``rope`` in all layers.
        rope_size: the size that rotary tables are made for, where it is not that of a head; 0: it is.
        embedding_scale: multiplies the embeddings of tokens, rounded to the dtype of the model.
        stream_scale: multiplies what enters the blocks: embeddings of tokens, and those given in place of token ids.
        logits_scale: multiplies the logits.
        logits_cap: logits become cap * tanh(logits / cap); None: they stay.
        head_bias: whether the output head has a bias.
        ignored: what the names of tensors begin with that are not used.
        buffers: ends of the names of tensors in checkpoints that are no weights.
        experts: of the layers that have some in the place of an MLP; None: no layer has.
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
            not_implemented("hidden_act", self.mlp.activation, "silu, in a model with experts, delta nets or Mamba")
        if self.tied and self.head_bias and self.task is Task.GENERATE:
            not_implemented("tie_word_embeddings", True, "false, in a model whose head has a bias")
        attention = self.attention
        is_plain = attention.latent is None and attention.soft_cap is None and not attention.has_sinks
        if not self.is_causal and not (is_plain and self.stateful is None and not any(self.windows)):
            not_implemented("is_causal", False, "true, in a model with windows, caps, states or latent attention")

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
        """Whether this layer keeps a state, and no keys and values."""
        return (net := self.stateful) is not None and layer in net.layers

    @property
    def stateful(self) -> DeltaNetConfig | ShortConvConfig | MambaConfig | None:
        """What layers have that keep a state; None: there are none."""
        return self.delta_net or self.short_conv or self.mamba

    def layers_like(self, layer: int) -> list[int]:
        """The layers that keep a state if this one does, else those that keep keys and values."""
        return [each for each in range(self.num_layers) if self.keeps_state(each) == self.keeps_state(layer)]

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of this layer; None: it has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of this layer; None: it has none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def head(self) -> dict[str, int]:
        """The output layer of its own, if it has one: its name in the checkpoint, and the size of its output."""
        if self.task is Task.CLASSIFY:
            return {"score": self.num_labels}
        return {} if self.tied or self.task is Task.EMBED else {self.names.head: self.vocab_size}


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that say how many scores a classifier gives."""

    id2label: dict[int | str, object] | None = None
    num_labels: int | None = None

    @property
    def num_scores(self) -> int:
        """As many as names; without these, ``num_labels`` or two. Raises ValueError where there are none."""
        given = 2 if self.num_labels is None else self.num_labels
        found = given if self.id2label is None else len(self.id2label)
        if not 1 <= found <= _MAX_LABELS:
            not_implemented("num_labels", found, f"1 to {_MAX_LABELS}")
        return found


class FamilyConfig(Labels, frozen=True, kw_only=True):
    """The fields of config.json that all families have. Fields that are not here do not change the results.

    Raises ValueError for a value that is not implemented.

    Attributes:
        tasks: the end of a name in ``architectures`` -> the task of such a model.
        default_partial: the part of a head that is rotated where the file does not say it; None: always all of it.
        default_theta: ``rope_theta`` where the file does not say it.
        has_one_window: the window of ``sliding_window`` is that of all layers, whatever ``layer_types`` says.
    """

    default_partial: ClassVar[float | None] = None
    default_theta: ClassVar[float] = 10_000.0
    has_one_window: ClassVar[bool] = False
    tasks: ClassVar[Mapping[str, Task]] = {
        "ForCausalLM": Task.GENERATE,
        "ForSequenceClassification": Task.CLASSIFY,
        "Model": Task.EMBED,
    }

    architectures: list[str] | None = None
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
    hidden_act: str = "silu"
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    partial_rotary_factor: float | None = None
    is_causal: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        self._check_choice("hidden_act", ACTIVATIONS)
        if self.default_partial is None and self.partial_rotary_factor not in (None, 1.0):
            not_implemented("partial_rotary_factor", self.partial_rotary_factor, "1.0")
        if not 0 < self.rms_norm_eps <= 1:
            not_implemented(file_names(self)["rms_norm_eps"], self.rms_norm_eps, "more than 0, at most 1")
        if self.num_attention_heads % self.num_kv_heads:
            not_implemented("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_attention_heads} heads")
        if self.head_size % 2 or not self.head_size:
            not_implemented("head_dim", self.head_size, "an even number")
        if self.window is not None and self.window < 1:
            not_implemented("sliding_window", self.window, "at least 1 position, or null")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            not_implemented(
                "layer_types",
                f"of {len(self.layer_types)} layers",
                f"one for each of the {self.num_hidden_layers} layers",
            )
        if self.has_one_window and self.window is not None and "full_attention" in (self.layer_types or ()):
            not_implemented("layer_types", self.layer_types, "sliding_attention alone, where there is a sliding window")
        if self.window is None and "sliding_attention" in (self.layer_types or ()):
            not_implemented("layer_types", self.layer_types, "full_attention alone, where there is no sliding window")

    def _check_choice(self, field: str, known: Mapping[str, object]) -> None:
        value = getattr(self, field)
        if value not in known:
            not_implemented(file_names(self)[field], value, ", ".join(known))

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """The number of positions that a token attends to in layers with a sliding window; None: there are none."""
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As in ``TransformerConfig``."""
        if self.window is None:
            return ()
        kinds = self.layer_types or ["sliding_attention"] * self.num_hidden_layers
        return tuple(self.window if kind == "sliding_attention" else None for kind in kinds)

    @property
    def task(self) -> Task:
        return task_of(self.architectures, self.tasks)

    def rope(self, raw: Mapping[str, object]) -> RopeConfig:
        """The rotary embedding that config.json describes."""
        theta, partial = raw.get("rope_theta"), self.partial_rotary_factor
        raw = {**raw, "rope_theta": self.default_theta if theta is None else theta}
        return read_rope(raw, partial=self.default_partial if partial is None else partial)

    def decoder(self, rope: RopeConfig) -> DecoderConfig:
        """A decoder with these fields and the parts of Llama, of which families replace what is different.

        Raises:
            ValueError: the rotary embedding does not fit the size of a head.
        """
        rope.check_head(self.head_size)
        return DecoderConfig(
            task=self.task,
            num_labels=self.num_scores if self.task is Task.CLASSIFY else 0,
            is_causal=self.is_causal,
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
            windows=self.windows,
            mlp=MlpConfig(activation=ACTIVATIONS[self.hidden_act]),
        )


def task_of(architectures: list[str] | None, tasks: Mapping[str, Task]) -> Task:
    """The task of the first architecture; without one, that of the family.

    Raises:
        ValueError: the architecture is not implemented.
    """
    if not architectures:
        return next(iter(tasks.values()))
    task = next((task for end, task in tasks.items() if architectures[0].endswith(end)), None)
    if task is None:
        not_implemented("architectures", architectures, ", ".join(f"...{end}" for end in tasks))
    return task


def check_sizes(config: msgspec.Struct) -> None:
    """Raise ValueError for a size beyond ``MAX_SIZES``."""
    given, names = msgspec.structs.asdict(config), file_names(config)
    for name, most in MAX_SIZES.items():
        least = 0 if name in _MAY_BE_ZERO else 1
        if given.get(name) is not None and not least <= given[name] <= most:
            not_implemented(names[name], given[name], f"{least} to {most}")


def check_factor(field: str, factor: float) -> None:
    """Raise ValueError for a number whose square or inverse leaves the range of floats."""
    if not _MIN_FACTOR <= factor <= _MAX_FACTOR:
        not_implemented(field, factor, f"{_MIN_FACTOR:g} to {_MAX_FACTOR:g}")


def file_names(config: msgspec.Struct) -> dict[str, str]:
    """The name in config.json of each field."""
    return {field.name: field.encode_name for field in msgspec.structs.fields(config)}


def check_experts(num_experts: int, top_k: int, sparse_step: int = 1, *, name: str = "num_experts") -> None:
    """Raise ValueError unless ``top_k`` of ``num_experts`` can be chosen, in every ``sparse_step``-th layer.

    ``name``: what config.json calls ``num_experts``.
    """
    if num_experts < 1:
        not_implemented(name, num_experts, "at least 1")
    if not 1 <= top_k <= num_experts:
        not_implemented("num_experts_per_tok", top_k, f"1 to {num_experts}, the number of experts")
    if sparse_step < 1:
        not_implemented("decoder_sparse_step", sparse_step, "at least 1")


def as_embedder(raw: Mapping[str, object]) -> dict[str, object]:
    """config.json of a model of any task, read as that of the same model without its head."""
    return {**raw, "architectures": ["Model"]}


def not_implemented(field: str, value: object, implemented: str) -> NoReturn:
    message = f"{field} {shown(value)} is not implemented; what works: {implemented}"
    raise ValueError(message)


def decode_config(raw: Mapping[str, object], config_type: type[ConfigType]) -> ConfigType:
    """Read config.json, or an object in it, into a Struct.

    Raises:
        ValueError: a field is missing, has a wrong type, or a value that is not implemented; the message names it.
    """
    if raw.get("per_layer_config"):
        not_implemented("per_layer_config", raw["per_layer_config"], "layers of the same config")
    if raw.get("quantization_config") is not None:
        not_implemented("quantization_config", raw["quantization_config"], "checkpoints that are not quantized")
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        wrong = cut(str(error)) + _what_works(error, config_type)
        message = f"config.json of model_type {shown(raw.get('model_type'))}: {wrong}"
        raise ValueError(message) from error


def _what_works(error: msgspec.ValidationError, config_type: type[msgspec.Struct]) -> str:
    """ "; what works: ..." where the field that the error names may have a few values alone, else nothing."""
    found = re.search(r"at `\$\.(\w+)", str(error))
    names = {field.encode_name: field.name for field in msgspec.structs.fields(config_type)}
    name = names.get(found[1]) if found else None
    left = [typing.get_type_hints(config_type)[name]] if name else []
    values: list[object] = []
    while left:
        kind = left.pop(0)
        if kind is types.NoneType:
            values.append(None)
        elif typing.get_origin(kind) is Literal:
            values += typing.get_args(kind)
        elif typing.get_origin(kind) in (list, typing.Union, types.UnionType):
            left += typing.get_args(kind)
        else:
            return ""
    return "; what works: " + ", ".join(msgspec.json.encode(value).decode() for value in values) if values else ""


def read_rope(raw: Mapping[str, object], *, partial: float | None = None) -> RopeConfig:
    """Read ``rope_parameters``, or in an older config.json ``rope_scaling`` and ``rope_theta``.

    Args:
        partial: the part of a head that is rotated, where the file does not say it; None: the family rotates all of it.

    Raises:
        ValueError: the scaling is not implemented.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        message = f"rope_parameters {shown(given)} in config.json is not an object"
        raise ValueError(message)
    theta = raw.get("rope_theta")
    fields: dict[str, object] = {"rope_theta": RopeConfig().rope_theta if theta is None else theta}
    if partial is not None:
        fields["partial_rotary_factor"] = partial
    fields |= {"rope_type": given.get("type", "default"), **given}
    original = raw.get("original_max_position_embeddings")
    if original is not None and fields["rope_type"] in _OF_ORIGINAL:  # beside the scaling it counts more than in it
        fields["original_max_position_embeddings"] = original
    found = decode_config({**fields, "model_type": raw.get("model_type")}, RopeConfig)
    if partial is None and found.partial_rotary_factor != 1.0:
        not_implemented("partial_rotary_factor", found.partial_rotary_factor, "1.0")
    return found


def read_layer_rope(
    given: Mapping[str, object] | None, scaling: Mapping[str, object] | None, theta: float
) -> RopeConfig:
    """Read the rotary embedding of one kind of layers.

    Args:
        given: its part of ``rope_parameters``. scaling: ``rope_scaling`` of older files, where it is for these layers.
        theta: where neither says it.

    Raises:
        ValueError: the scaling is not implemented, or transformers computes another one than the file says.
    """
    scaling, given = scaling or {}, given or {}
    if "type" in scaling and "rope_type" not in scaling:
        not_implemented("rope_scaling.type", scaling["type"], "the name rope_type, in a model with several rotations")
    parameters = {**given, **scaling}
    if parameters.get("truncate") is False:
        not_implemented("rope_parameters.truncate", False, "true, in a model with several rotations")
    return read_rope({"rope_theta": theta, "rope_parameters": parameters})
