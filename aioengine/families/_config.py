"""The facts about any model, the decoder that most families describe, and the fields of config.json they share.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final, Literal

import msgspec

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
from aioengine.families._fields import check_sizes, decode_config, file_names, not_implemented
from aioengine.families._rope_config import RopeConfig, read_rope

_MAX_LABELS: Final = 2**20


class Task(StrEnum):
    """The use that a model was trained for, which decides which requests it serves."""

    GENERATE = "generate"  # its output is the next token
    EMBED = "embed"  # its output is hidden states, which are pooled into a vector
    CLASSIFY = "classify"  # its output is a score for each class


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


def as_embedder(raw: Mapping[str, object]) -> dict[str, object]:
    """config.json of a model of any task, read as that of the same model without its head."""
    return {**raw, "architectures": ["Model"]}


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


class DecoderFamily(Labels, frozen=True, kw_only=True):
    """The fields of config.json that all families of decoders have. Fields that are not here do not change the results.

    A family extends it with the fields of its own, and ``decoder`` with what they come to.

    Raises ValueError for a value that is not implemented.

    Attributes:
        tasks: the end of a name in ``architectures`` -> the task of such a model.
        default_partial: the part of a head that is rotated where the file does not say it; None: always all of it.
        default_theta: ``rope_theta`` where the file does not say it.
        has_one_window: the window of ``sliding_window`` is that of all layers, whatever ``layer_types`` says.
        unread: fields that do not change the results of this family.
    """

    default_partial: ClassVar[float | None] = None
    default_theta: ClassVar[float] = 10_000.0
    has_one_window: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ()
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

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """The decoder that config.json describes. Raises ValueError for a value that is not implemented."""
        return decode_config({name: config[name] for name in config if name not in cls.unread}, cls).decoder()

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotated_size(self) -> int:
        """The numbers of a head that ``rope`` is for."""
        return self.head_size

    @property
    def window(self) -> int | None:
        """The number of positions that a token attends to in layers with a sliding window; None: there are none."""
        return None

    def has_window(self, layer: int) -> bool:
        """Whether this layer has the sliding window in a file without ``layer_types``."""
        return True

    @property
    def layer_kinds(self) -> Sequence[str]:
        """The type of each layer, as in ``layer_types``."""
        layers = range(self.num_hidden_layers)
        return self.layer_types or ["sliding_attention" if self.has_window(i) else "full_attention" for i in layers]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As in ``TransformerConfig``."""
        if self.window is None:
            return ()
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.layer_kinds)

    @property
    def task(self) -> Task:
        return task_of(self.architectures, self.tasks)

    @property
    def rotation(self) -> Mapping[str, object]:
        """``rope_parameters``, or in older files ``rope_scaling``."""
        return self.rope_scaling or self.rope_parameters or {}

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding that config.json describes."""
        return read_rope(
            self.rotation,
            self.default_theta if self.rope_theta is None else self.rope_theta,
            partial=self.default_partial if self.partial_rotary_factor is None else self.partial_rotary_factor,
            original=self.original_max_position_embeddings,
        )

    def decoder(self) -> DecoderConfig:
        """A decoder with these fields and the parts of Llama, of which families replace what is different.

        Raises:
            ValueError: the rotary embedding does not fit the size of a head.
        """
        rope = self.rope
        rope.check_head(self.rotated_size)
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


class WindowFamily(DecoderFamily, frozen=True, kw_only=True):
    """A family of decoders with a sliding window."""

    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window


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
