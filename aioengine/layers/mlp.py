"""Feed-forward layers. T tokens, D model size, I inner size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.adapters import Grouping
    from aioengine.layers.placement import Placement, Target


class GatedMLP:
    """down(silu(gate(x)) * up(x)), [T, D] -> [T, D], with gate and up as one matmul."""

    def __init__(self, hidden_size: int, intermediate_size: int, placement: Placement, *, bias: bool) -> None:
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._gate_up = Linear(hidden_size, sizes, placement, bias=bias, is_gated=True)
        self._down = Linear(intermediate_size, {"down_proj": hidden_size}, placement, bias=bias)

    def weights(self, prefix: str) -> dict[str, Target]:
        return self._gate_up.weights(prefix) | self._down.weights(prefix)

    def finish_loading(self) -> None:
        self._gate_up.finish_loading()
        self._down.finish_loading()

    def open_for_loading(self) -> None:
        self._gate_up.open_for_loading()
        self._down.open_for_loading()

    def linears(self) -> list[Linear]:
        return [self._gate_up, self._down]

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D]. ``rows``: as in ``Linear``."""
        return self._down(self._gate_up(x, rows), rows)
