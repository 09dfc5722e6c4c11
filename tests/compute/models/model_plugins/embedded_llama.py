"""A Llama that reads embeddings instead of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families.llama import LlamaFamily
from aioengine.models._base import InputSpec
from aioengine.models._decoder import DecoderModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.models._base import ModelInputs, ModelOptions


class EmbeddedLlama(DecoderModel):
    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(LlamaFamily.read(config), options)
        self.input_spec = InputSpec(embeddings=True)

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        assert inputs.token_ids is None
        return super().forward(inputs, attention)


PLUGIN = EmbeddedLlama
