"""The base class of layers that keep a recurrent state per request instead of keys and values.

Shape letters: T tokens, S selected tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.layers.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.states import StepStates


class StateLayer(Layer):
    """[T, D] -> [T, D], or [S, D] for selected tokens."""

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
        raise NotImplementedError
