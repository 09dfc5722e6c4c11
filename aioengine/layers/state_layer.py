"""What layers that keep a state for each request, in the place of attention, have in common. T tokens, D model size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.layers.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.linear import Linear
    from aioengine.layers.states import StepStates


class StateLayer(Layer):
    """[T, D] -> [T, D], or [S, D] for selected tokens, between a linear layer that reads the stream and one behind."""

    _input: Linear
    _output: Linear

    def __call__(
        self,
        x: Tensor,
        states: StepStates,
        layer: int,
        *,
        outputs: Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D], or [S, D] with ``outputs``.

        Args:
            layer: the index of this layer among those with states.
            outputs: [S] int64 indices of the tokens whose results are needed, None for all; the states are those behind
                all tokens.
            adapters: None where no row has one.
        """
        raise NotImplementedError
