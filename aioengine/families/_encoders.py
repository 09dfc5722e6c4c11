"""Encoders: their config, and the families of BERT, RoBERTa and ModernBERT. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import Struct, field

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task, TextFamily, TransformerConfig
from aioengine.families._fields import check_sizes, decode_config, not_implemented
from aioengine.families._rope_config import RopeConfig, read_layer_rope

Gelu = Literal["none", "tanh"]
"""Approximation of GELU."""

GELU: dict[str, Gelu] = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""Supported activation names in config.json -> approximation of GELU."""


class HeadConfig(Struct, frozen=True, kw_only=True):
    """The head of a classifier: scores(norm(activation(dense(pooled)))).

    Attributes:
        dense, scores, norm: names in the checkpoint. ``norm`` is "" if there is none.
    """

    dense: str
    scores: str
    activation: Literal["tanh", "gelu"] = "tanh"
    dense_bias: bool = True
    norm: str = ""


class EncoderConfig(TransformerConfig, frozen=True, kw_only=True):
    """A bidirectional encoder, with its names in the checkpoint.

    Attributes:
        is_pre_norm: norms precede attention and MLP, and a norm follows the last block. Otherwise norms follow both.
        is_gated: the MLP is second(gelu(a) * b), where a and b are the halves of the first layer's output.
        position_offset: row of the first position in the table of learned positions; None with rotary positions.
        ropes: rotary embeddings of layers without and with a window.
        embeddings: table name -> number of rows. The token table is first.
        norms: the norm of the embeddings, and in a pre-norm model the last norm.
        blocks: name of the list of blocks.
        linears: layers of a block: queries, keys and values (fused or three layers), attention output, first and
            second layer of the MLP.
        block_norms: norms of a block: attention, MLP.
        first_without: the norm that block 0 lacks; "" if it has both.
        head: the head of a classifier.
        ignored: prefixes of checkpoint tensors that the model does not load.
    """

    is_causal: bool = False
    is_pre_norm: bool = False
    is_gated: bool = False
    gelu: Gelu = "none"
    norm_bias: bool = True
    position_offset: int | None = None
    ropes: tuple[RopeConfig, RopeConfig] = (RopeConfig(), RopeConfig())
    embeddings: dict[str, int] = field(default_factory=dict[str, int])
    norms: tuple[str, ...] = ()
    blocks: str = ""
    linears: tuple[LinearShape, ...] = ()
    block_norms: tuple[str, str] = ("", "")
    first_without: str = ""
    head: HeadConfig | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    ignored: tuple[str, ...] = ()


class EncoderFamily(TextFamily, frozen=True, kw_only=True):
    """The fields of config.json that all families of encoders share.

    A family adds its own fields. Fields that do not change results are left out. It describes the model with class
    variables, properties and fields that have the names of fields of ``EncoderConfig``. Raises ValueError for a value
    that is not implemented.
    """

    tasks: ClassVar[Mapping[str, Task]] = {
        "Model": Task.EMBED,
        "ForMaskedLM": Task.EMBED,
        "ForSequenceClassification": Task.CLASSIFY,
    }

    epsilon: float
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            divisor = f"a divisor of {self.hidden_size}, with even heads"
            not_implemented("num_attention_heads", self.num_attention_heads, divisor)

    @classmethod
    def read(cls, config: Mapping[str, object]) -> EncoderConfig:
        """Read config.json. Raises ValueError for a value that is not implemented."""
        family = decode_config(config, cls)
        return family.config(EncoderConfig, max_position_embeddings=family.num_positions)

    @property
    def num_kv_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def gelu(self) -> Gelu:
        return GELU[self.hidden_act]

    @property
    def num_positions(self) -> int:
        """The trained context length."""
        return self.max_position_embeddings


class BertFamily(EncoderFamily, frozen=True, kw_only=True):
    """BERT.

    Attributes:
        base: name of the base model in the checkpoint.
        classifier: the head of a classifier.
        position_offset: see ``EncoderConfig``.
    """

    base: ClassVar[str] = "bert"
    classifier: ClassVar[HeadConfig] = HeadConfig(dense="bert.pooler.dense", scores="classifier")
    norms = ("embeddings.LayerNorm",)
    blocks = "encoder.layer"
    block_norms = ("attention.output.LayerNorm", "output.LayerNorm")

    epsilon: float = field(default=1e-12, name="layer_norm_eps")
    type_vocab_size: int = 2
    pad_token_id: int = 0
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False

    @property
    def num_positions(self) -> int:
        num_positions = self.max_position_embeddings - self.position_offset
        if num_positions < 1:
            not_implemented("max_position_embeddings", self.max_position_embeddings, f"above {self.position_offset}")
        return num_positions

    @property
    def prefix(self) -> str:
        return f"{self.base}."

    @property
    def position_offset(self) -> int:
        return 0

    @property
    def embeddings(self) -> dict[str, int]:
        return {
            "embeddings.word_embeddings": self.vocab_size,
            "embeddings.position_embeddings": self.max_position_embeddings,
            "embeddings.token_type_embeddings": self.type_vocab_size,
        }

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        outer, inner = self.hidden_size, self.intermediate_size
        return (
            *(LinearShape(f"attention.self.{part}", outer, outer, True) for part in ("query", "key", "value")),
            LinearShape("attention.output.dense", outer, outer, True),
            LinearShape("intermediate.dense", inner, outer, True),
            LinearShape("output.dense", outer, inner, True),
        )

    @property
    def head(self) -> HeadConfig | None:
        return self.classifier if self.task is Task.CLASSIFY else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Prefixes of the masked-language-model head, and of the pooler unless the classifier reads it."""
        pooler = f"{self.base}.pooler."
        reads_pooler = self.head is not None and self.head.dense.startswith(pooler)
        return ("cls.", "lm_head.") if reads_pooler else ("cls.", "lm_head.", pooler)


class RobertaFamily(BertFamily, frozen=True, kw_only=True):
    """RoBERTa, XLM-RoBERTa: positions start after the padding id; a different classifier head."""

    base: ClassVar[str] = "roberta"
    classifier: ClassVar[HeadConfig] = HeadConfig(dense="classifier.dense", scores="classifier.out_proj")

    pad_token_id: int = 1

    @property
    def position_offset(self) -> int:
        return self.pad_token_id + 1


LayerType = Literal["full_attention", "sliding_attention"]


class ModernBertFamily(EncoderFamily, frozen=True, kw_only=True):
    """ModernBERT: pre-norm, gated MLP, rotary positions, and sliding windows in two of three layers."""

    is_pre_norm = True
    is_gated = True
    norms = ("embeddings.norm", "final_norm")
    blocks = "layers"
    block_norms = ("attn_norm", "mlp_norm")
    first_without = "attn_norm"

    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = field(default="gelu", name="hidden_activation")
    epsilon: float = field(default=1e-5, name="norm_eps")
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    global_every: int = field(default=3, name="global_attn_every_n_layers")
    layer_types: list[LayerType] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: dict[LayerType, dict[str, object]] | None = None
    rope_scaling: dict[str, object] | None = None
    sliding_window: int | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: Literal["gelu"] = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window not in (None, self.local_attention // 2):
            not_implemented("sliding_window", self.sliding_window, "null or half of local_attention")
        self.check_length("layer_types", self.layer_types)

    @property
    def kinds(self) -> list[LayerType]:
        """``layer_types``, or its default."""
        layers = range(self.num_hidden_layers)
        return self.layer_types or [
            "sliding_attention" if layer % self.global_every else "full_attention" for layer in layers
        ]

    @property
    def ropes(self) -> tuple[RopeConfig, RopeConfig]:
        parameters, full_theta = self.rope_parameters or {}, self.global_rope_theta
        local_theta = full_theta if self.local_rope_theta is None else self.local_rope_theta
        return (
            read_layer_rope(parameters.get("full_attention"), self.rope_scaling, full_theta),
            read_layer_rope(parameters.get("sliding_attention"), self.rope_scaling, local_theta),
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if kind == "full_attention" else self.local_attention // 2 for kind in self.kinds)

    @property
    def embeddings(self) -> dict[str, int]:
        return {"embeddings.tok_embeddings": self.vocab_size}

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        outer, inner = self.hidden_size, self.intermediate_size
        return (
            LinearShape("attn.Wqkv", 3 * outer, outer, self.attention_bias),
            LinearShape("attn.Wo", outer, outer, self.attention_bias),
            LinearShape("mlp.Wi", 2 * inner, outer, self.mlp_bias),
            LinearShape("mlp.Wo", outer, inner, self.mlp_bias),
        )

    @property
    def head(self) -> HeadConfig | None:
        if self.task is not Task.CLASSIFY:
            return None
        return HeadConfig(
            dense="head.dense",
            scores="classifier",
            activation="gelu",
            dense_bias=self.classifier_bias,
            norm="head.norm",
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("decoder.",) if self.task is Task.CLASSIFY else ("decoder.", "head.", "classifier.")
