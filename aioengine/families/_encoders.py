"""Encoders: every token attends to all of its text. What their families make of config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import Struct

from aioengine.families._config import Labels, Task, TransformerConfig, task_of
from aioengine.families._fields import check_sizes, decode_config, not_implemented
from aioengine.families._rope_config import RopeConfig

Gelu = Literal["none", "tanh"]
"""How GELU is approximated."""

GELU: dict[str, Gelu] = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""The activations of config.json that are implemented."""


class LinearShape(Struct, frozen=True):
    """A linear layer of a block: its name in the checkpoint and its sizes."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool


class HeadConfig(Struct, frozen=True, kw_only=True):
    """The head of a classifier: scores(norm(activation(dense(pooled)))), by their names in the checkpoint.

    ``norm`` "": there is none.
    """

    dense: str
    scores: str
    activation: Literal["tanh", "gelu"] = "tanh"
    dense_bias: bool = True
    norm: str = ""


class EncoderConfig(TransformerConfig, frozen=True, kw_only=True):
    """An encoder, with the names of its tensors in the checkpoint.

    Attributes:
        is_pre_norm: the norms stand before attention and MLP, and one at the end; else after each of the two.
        is_gated: the MLP is output(gelu(a) * b), where a and b are the halves of its first matmul.
        gelu: how it is approximated.
        position_offset: of the learned position of the first token; None: positions are rotary.
        ropes: of the layers that attend to all, and of those with a window.
        embeddings: names -> rows, of tokens first. norms: behind the embeddings, and the last one of a pre-norm model.
        blocks: name of the list of blocks. linears: of a block, qkv (fused or three), output, first and second of the
            MLP. block_norms: of a block, that of attention first. first_without: the norm that block 0 has not.
        head: of a classifier. ignored: prefixes of tensors that are not loaded.
    """

    is_causal: bool = False
    is_pre_norm: bool = False
    is_gated: bool = False
    gelu: Gelu = "none"
    norm_bias: bool = True
    position_offset: int | None = None
    ropes: tuple[RopeConfig, RopeConfig] = (RopeConfig(), RopeConfig())
    embeddings: dict[str, int]
    norms: tuple[str, ...]
    blocks: str
    linears: tuple[LinearShape, ...]
    block_norms: tuple[str, str]
    first_without: str = ""
    head: HeadConfig | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    ignored: tuple[str, ...] = ()


class EncoderFamily(Labels, frozen=True, kw_only=True):
    """The fields of config.json that all encoders have. Fields that are not here do not change the results.

    Raises ValueError for a value that is not implemented.
    """

    tasks: ClassVar[Mapping[str, Task]] = {
        "Model": Task.EMBED,
        "ForMaskedLM": Task.EMBED,
        "ForSequenceClassification": Task.CLASSIFY,
    }

    architectures: list[str] | None = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            not_implemented(
                "num_attention_heads", self.num_attention_heads, f"a divisor of {self.hidden_size}, with even heads"
            )

    @classmethod
    def read(cls, config: Mapping[str, object]) -> EncoderConfig:
        """The encoder that config.json describes. Raises ValueError for a value that is not implemented."""
        return decode_config(config, cls).encoder()

    def encoder(self) -> EncoderConfig:
        """The encoder that these fields describe."""
        raise NotImplementedError

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def task(self) -> Task:
        return task_of(self.architectures, self.tasks)
