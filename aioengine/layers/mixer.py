"""The base class of layers that keep a recurrent state per request instead of keys and values.

Shape letters: T tokens, S selected tokens, D hidden size, P outputs of the first matmul, I inputs of the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.layers.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.linear import Linear
    from aioengine.layers.states import StepStates


class StateLayer(Layer):
    """[T, D] -> [T, D], or [S, D] for selected tokens. Subclasses set the two linear layers."""

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
            layer: index of this layer among the layers with a state.
            outputs: [S] int64 indices of the selected tokens; None for all. The states are updated for all tokens.
            adapters: None if no row has an adapter.
        """
        rows = None if adapters is None else adapters.tokens
        mixed, gates = self.mix(self._input(x, rows), states, layer)
        if outputs is not None:
            mixed, gates = mixed.index_select(0, outputs), gates.index_select(0, outputs)
            rows = None if adapters is None else adapters.outputs
        return self._output(self.gate(mixed, gates), rows)

    def mix(self, projected: Tensor, states: StepStates, layer: int) -> tuple[Tensor, Tensor]:
        """Update the states. projected [T, P] -> mixed tokens [T, ...], and the gates of the outputs [T, I]."""
        raise NotImplementedError

    def gate(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """Mixed [S, ...] and gates [S, I] -> inputs of the last matmul [S, I]."""
        raise NotImplementedError
