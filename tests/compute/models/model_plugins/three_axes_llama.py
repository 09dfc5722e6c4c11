"""A Llama that reads three-axis positions and rows of tokens. It uses the maximum of the axes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioengine.families.llama import LlamaFamily
from aioengine.models._base import InputSpec
from aioengine.models._decoder import DecoderModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.models._base import ModelInputs, ModelOptions


class ThreeAxesLlama(DecoderModel):
    """``rows``: the rows of the last step."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(LlamaFamily.read(config), options)
        self.input_spec = InputSpec(position_axes=3, rows=True)
        self.rows: list[int] = []

    def forward(self, inputs: ModelInputs, attention: StepAttention) -> Tensor:
        assert inputs.token_ids is not None
        assert inputs.positions.shape == (3, len(inputs.token_ids))
        if inputs.rows is not None:
            assert inputs.rows.shape == inputs.token_ids.shape
            self.rows = inputs.rows.tolist()
        return super().forward(replace(inputs, positions=inputs.positions.amax(0)), attention)


PLUGIN = ThreeAxesLlama
