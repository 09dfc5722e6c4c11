"""Decoder models with recurrent states in some layers.

Shape letters: T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aioengine.layers.states import StateShape, StateTensor
from aioengine.models._decoder import DecoderModel
from aioengine.settings.memory_model import state_specs

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.families._config import DecoderConfig
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.states import StepStates
    from aioengine.models._base import ModelOptions
    from aioengine.models._decoder_block import BlockStep


class HybridDecoder(DecoderModel):
    """A decoder with gated delta nets, short convolutions or Mamba 2. Implements ``models._base.StatefulModel``."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        net = config.stateful
        assert net is not None, "no layer has a recurrent state"
        self.input_spec = replace(self.input_spec, states=True)
        dtypes = {True: torch.float32, False: options.dtype}
        tensors = (StateTensor(spec.shape, dtypes[spec.in_fp32]) for spec in state_specs(config))
        self.state_shape = StateShape(len(net.layers), tuple(tensors))

    def _step(
        self,
        positions: Tensor,
        attention: StepAttention,
        adapters: AdapterRows | None = None,
        states: StepStates | None = None,
    ) -> BlockStep:
        """Return the arguments of the blocks. ``positions``: [T]. Without ``states``, use states that are dropped."""
        step = super()._step(positions, attention, adapters, states)
        if states is None:
            step = replace(step, states=self.state_shape.one_row(len(positions), positions.device))
        return step
