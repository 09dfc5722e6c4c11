"""The base class of attention and of the layers that replace it.

Shape letters: T tokens, S selected tokens, D hidden size, P outputs of the first matmul, I inputs of the last one.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioengine.layers.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import StepAttention
    from aioengine.kernels.state_types import StateRows
    from aioengine.layers.adapters import AdapterRows, Grouping
    from aioengine.layers.linear import Linear
    from aioengine.layers.states import StepStates

    Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The arguments of all blocks in a step.

    Attributes:
        tables: the tables of each rotary embedding of the model.
        adapters: None if no row has an adapter.
        states: None for a model without recurrent states.
    """

    tables: list[Tables]
    attention: StepAttention
    adapters: AdapterRows | None = None
    states: StepStates | None = None

    def rows(self, outputs: Tensor | None) -> Grouping | None:
        """Return the tokens ``outputs`` [S] (None: all) by adapter; None if no row has an adapter."""
        if self.adapters is None:
            return None
        return self.adapters.tokens if outputs is None else self.adapters.outputs

    def state(self, layer: int) -> tuple[list[Tensor], StateRows]:
        """Return the states of a layer, tensors [N, ...] of N slots, and the rows of the step."""
        assert self.states is not None, "a model with recurrent states needs them in each step"
        return [tensor[layer] for tensor in self.states.pool], self.states.rows


class Mixer(Layer, metaclass=ABCMeta):
    """Mixes the tokens of a request: [T, D] -> [T, D], or [S, D] for selected tokens.

    Subclasses set the first and the last matmul.
    """

    _input: Linear
    _output: Linear

    def __call__(self, x: Tensor, step: BlockStep, layer: int, *, outputs: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [S, D] with ``outputs``. The KV cache and the states are updated for all tokens.

        Args:
            layer: index of this layer among the layers with keys and values, or with a state.
            outputs: [S] int64 indices of the selected tokens; None for all.
        """
        mixed = self.mix(self._input(x, step.rows(None)), step, layer)
        if outputs is not None:
            mixed = tuple(part.index_select(0, outputs) for part in mixed)
        return self._output(self.finish(*mixed), step.rows(outputs))

    @abstractmethod
    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, ...]:
        """Update the KV cache or the states of a layer. projected [T, P] -> arguments of ``finish`` [T, ...]."""

    @abstractmethod
    def finish(self, *mixed: Tensor) -> Tensor:
        """Results of ``mix`` for the selected tokens [S, ...] -> inputs of the last matmul [S, I]."""
