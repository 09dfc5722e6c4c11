"""Configs of encoders, and the base class of their families. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from msgspec import Struct, field

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task, TextFamily, TransformerConfig
from aioengine.families._fields import check_sizes, decode_config, not_implemented
from aioengine.families._rope_config import RopeConfig

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

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            not_implemented(
                "num_attention_heads", self.num_attention_heads, f"a divisor of {self.hidden_size}, with even heads"
            )

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
    def num_positions(self) -> int:
        """The trained context length."""
        return self.max_position_embeddings
