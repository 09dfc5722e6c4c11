"""Decoders some of whose layers keep a state for each request, where others keep keys and values. T tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioengine.families._block_config import MambaConfig, ShortConvConfig
from aioengine.layers.delta_net import delta_net_state
from aioengine.layers.mamba import mamba_state
from aioengine.layers.states import StateShape, StateTensor
from aioengine.models._decoder import DecoderModel

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.families._config import DecoderConfig
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.states import StepStates
    from aioengine.models._base import ModelOptions
    from aioengine.models._decoder_block import BlockStep


class HybridDecoder(DecoderModel):
    """A decoder with gated delta nets, short convolutions or layers of Mamba 2; see ``models._base.StatefulModel``."""

    def __init__(self, config: DecoderConfig, options: ModelOptions) -> None:
        super().__init__(config, options)
        net = config.stateful
        assert net is not None, "no layer keeps a state"
        self.input_spec = replace(self.input_spec, states=True)
        if isinstance(net, MambaConfig):
            tensors: tuple[StateTensor, ...] = mamba_state(net, options.dtype)
        elif isinstance(net, ShortConvConfig):
            tensors = (StateTensor((net.width - 1, config.hidden_size), options.dtype),)
        else:
            tensors = delta_net_state(net, options.dtype)
        self.state_shape = StateShape(len(net.layers), tensors)

    def _step(
        self,
        positions: Tensor,
        attention: StepAttention,
        adapters: AdapterRows | None = None,
        states: StepStates | None = None,
    ) -> BlockStep:
        """``positions`` [T]. Without ``states``, the tokens are a row from its start, whose states are dropped."""
        step = super()._step(positions, attention, adapters, states)
        if states is None:
            step = replace(step, states=self.state_shape.one_row(len(positions), positions.device))
        return step
