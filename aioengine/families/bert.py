"""BERT: learned positions, token types, norms after attention and MLP."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import field

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task
from aioengine.families._encoders import GELU, EncoderFamily, Gelu, HeadConfig
from aioengine.families._fields import not_implemented


class BertFamily(EncoderFamily, frozen=True, kw_only=True):
    """BERT.

    Attributes:
        base: name of the base model in the checkpoint.
        classifier: the head of a classifier.
        position_offset: see ``EncoderConfig``.
    """

    base: ClassVar[str] = "bert"
    classifier: ClassVar[HeadConfig] = HeadConfig(dense="bert.pooler.dense", scores="classifier")
    position_offset: ClassVar[int] = 0
    norms = ("embeddings.LayerNorm",)
    blocks = "encoder.layer"
    block_norms = ("attention.output.LayerNorm", "output.LayerNorm")

    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    epsilon: float = field(default=1e-12, name="layer_norm_eps")
    type_vocab_size: int = 2
    pad_token_id: int = 0
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False

    @property
    def num_positions(self) -> int:
        num_positions = self.max_position_embeddings - self.position_offset
        if num_positions < 1:
            not_implemented(
                "max_position_embeddings", self.max_position_embeddings, f"more than {self.position_offset}"
            )
        return num_positions

    @property
    def prefix(self) -> str:
        return f"{self.base}."

    @property
    def gelu(self) -> Gelu:
        return GELU[self.hidden_act]

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


PLUGIN = BertFamily
