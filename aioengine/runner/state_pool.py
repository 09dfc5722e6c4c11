"""The pool of states: memory for the states of each running request. N slots, R rows, L layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.state_rows import StateRows
from aioengine.layers.states import StepStates, token_blocks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.layers.states import StateShape
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int64]


class StatePool:
    """The states of open requests: that of a request is at its row index, from its first step to its last.

    Nothing is cleared: a row that begins at position 0 takes its state for zero. Steps read and write in the order of
    their launches, so a slot can have a new request while the last step of the one before still runs.

    Attributes:
        tensors: [L, N, ...] for each tensor of a layer; the slot behind those of ``max_rows`` requests is for rows that
            pad a CUDA graph.
        facts: how many requests have states, and the memory of all.
    """

    def __init__(self, shape: StateShape, *, max_rows: int, device: torch.device) -> None:
        self.tensors = tuple(
            torch.empty(shape.num_layers, max_rows + 1, *tensor.shape, dtype=tensor.dtype, device=device)
            for tensor in shape.tensors
        )
        num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.facts = {"max_running_requests": max_rows, "states_bytes": num_bytes}
        self._max_rows = max_rows

    def of_step(self, row_indices: Ints, starts: Ints, counts: Ints, upload: Upload) -> StepStates:
        """The states of the rows at these indices, of which ``counts`` tokens are computed from ``starts`` on; [R]."""
        blocks = None
        if self.tensors[0].is_cuda and counts.max() > 1:
            blocks = upload(token_blocks(counts))
        rows = StateRows(upload(row_indices), upload(starts), upload(counts.cumsum()), blocks)
        return StepStates(self.tensors, rows)

    def of_graph(self, row_indices: Tensor, positions: Tensor, is_padding: Tensor) -> StepStates:
        """The states of the rows of a CUDA graph, one token each: row_indices, positions, is_padding [R]."""
        slots = torch.where(is_padding, self._max_rows, row_indices)
        ends = torch.arange(1, len(slots) + 1, device=slots.device)
        return StepStates(self.tensors, StateRows(slots, positions, ends))

    def release(self) -> None:
        """Free the memory; nothing may be computed after this."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
