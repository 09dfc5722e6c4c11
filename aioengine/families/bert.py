"""BERT: learned positions, token types, norms after attention and MLP."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from msgspec.structs import replace

from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task
from aioengine.families._encoders import GELU, EncoderConfig, EncoderFamily, HeadConfig
from aioengine.families._fields import not_implemented


class BertFamily(EncoderFamily, frozen=True, kw_only=True):
    """BERT.

    Attributes:
        base: name of the base model in the checkpoint.
        head: the head of a classifier.
    """

    base: ClassVar[str] = "bert"
    head: ClassVar[HeadConfig] = HeadConfig(dense="bert.pooler.dense", scores="classifier")

    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    epsilon: float = msgspec.field(default=1e-12, name="layer_norm_eps")
    type_vocab_size: int = 2
    pad_token_id: int = 0
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False

    @property
    def position_offset(self) -> int:
        """Row of the first position in the table of learned positions."""
        return 0

    @property
    def ignored(self) -> tuple[str, ...]:
        """Prefixes of the masked-language-model head, and of the pooler unless the classifier reads it."""
        reads_pooler = self.task is Task.CLASSIFY and self.head.dense.startswith(f"{self.base}.pooler.")
        return ("cls.", "lm_head.") if reads_pooler else ("cls.", "lm_head.", f"{self.base}.pooler.")

    def encoder(self) -> EncoderConfig:
        outer, inner = self.hidden_size, self.intermediate_size
        num_positions = self.max_position_embeddings - self.position_offset
        if num_positions < 1:
            not_implemented(
                "max_position_embeddings", self.max_position_embeddings, f"more than {self.position_offset}"
            )
        return replace(
            super().encoder(),
            max_position_embeddings=num_positions,
            prefix=f"{self.base}.",
            gelu=GELU[self.hidden_act],
            position_offset=self.position_offset,
            embeddings={
                "embeddings.word_embeddings": self.vocab_size,
                "embeddings.position_embeddings": self.max_position_embeddings,
                "embeddings.token_type_embeddings": self.type_vocab_size,
            },
            norms=("embeddings.LayerNorm",),
            blocks="encoder.layer",
            linears=(
                *(LinearShape(f"attention.self.{part}", outer, outer, True) for part in ("query", "key", "value")),
                LinearShape("attention.output.dense", outer, outer, True),
                LinearShape("intermediate.dense", inner, outer, True),
                LinearShape("output.dense", outer, inner, True),
            ),
            block_norms=("attention.output.LayerNorm", "output.LayerNorm"),
            head=self.head if self.task is Task.CLASSIFY else None,
            ignored=self.ignored,
        )


class RobertaFamily(BertFamily, frozen=True, kw_only=True):
    """RoBERTa, XLM-RoBERTa: positions start after the padding id; a different classifier head."""

    base: ClassVar[str] = "roberta"
    head: ClassVar[HeadConfig] = HeadConfig(dense="classifier.dense", scores="classifier.out_proj")

    pad_token_id: int = 1

    @property
    def position_offset(self) -> int:
        return self.pad_token_id + 1


PLUGIN = BertFamily
