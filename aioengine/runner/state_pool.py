"""The pool of states: memory for the states of each running request. N slots, R rows, L layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.kernels.state_rows import BLOCK_TOKENS, StateRows
from aioengine.layers.states import StepStates, token_blocks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.layers.states import StateShape
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int64]


_BEHIND_ALL: Final = 1 << 30
"""The first token of a block that has none."""


def _num_blocks(num_tokens: int, num_rows: int) -> int:
    """The most blocks of ``num_rows`` rows with ``num_tokens`` tokens."""
    return num_tokens // BLOCK_TOKENS + num_rows


def first_rows(states: StepStates, num_tokens: int, num_rows: int) -> StepStates:
    """The part of ``StatePool.padded`` for fewer rows and tokens: views."""
    slots, starts, ends, blocks = states.rows
    assert blocks is not None
    most = _num_blocks(num_tokens, num_rows)
    return StepStates(states.pool, StateRows(slots[:num_rows], starts[:num_rows], ends[:num_rows], blocks[:most]))


class StatePool:
    """The states of open requests: that of a request is at its row index, from its first step to its last.

    Nothing is cleared: a row that begins at position 0 takes its state for zero. Steps read and write in the order of
    their launches, so a slot can have a new request while the last step of the one before still runs.

    Snapshots are copies, in slots behind those of requests. They too are read and written between two steps, in the
    order of the launches.

    Attributes:
        tensors: [L, N, ...] for each tensor of a layer; the slot behind those of ``max_rows`` requests is for rows that
            pad a CUDA graph, and those behind it are of snapshots.
        facts: how many requests and snapshots have room, and the memory of all.
    """

    def __init__(self, shape: StateShape, *, max_rows: int, device: torch.device, num_snapshots: int = 0) -> None:
        num_slots = max_rows + 1 + num_snapshots
        self.tensors = tuple(
            torch.empty(shape.num_layers, num_slots, *tensor.shape, dtype=tensor.dtype, device=device)
            for tensor in shape.tensors
        )
        num_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self.facts = {"max_running_requests": max_rows, "num_snapshots": num_snapshots, "states_bytes": num_bytes}
        self._max_rows = max_rows
        self._copy(max_rows, max_rows)  # loads the kernel of a GPU

    def take_snapshot(self, row_index: int, snapshot_id: int) -> None:
        """Copy the states of a row to a snapshot, behind all that was launched."""
        self._copy(row_index, self._max_rows + 1 + snapshot_id)

    def restore(self, snapshot_id: int, row_index: int) -> None:
        """Copy a snapshot to the states of a row, whose first token is not at position 0."""
        self._copy(self._max_rows + 1 + snapshot_id, row_index)

    def _copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[:, target].copy_(tensor[:, source])

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

    def padded(self, num_tokens: int, num_rows: int) -> StepStates:
        """The states of up to ``num_rows`` rows with up to ``num_tokens`` tokens, in memory that never moves; ``fill``
        writes them.
        """
        device = self.tensors[0].device
        slots, starts, ends = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        blocks = torch.zeros(_num_blocks(num_tokens, num_rows), 2, dtype=torch.int32, device=device)
        return StepStates(self.tensors, StateRows(slots, starts, ends, blocks))

    def fill(self, into: StateRows, rows: StateRows) -> None:
        """Write the rows of a step to those of ``padded``, or to the first of them."""
        num_rows, blocks = len(rows.slots), rows.blocks
        if blocks is None:
            firsts = torch.arange(num_rows, dtype=torch.int32, device=rows.slots.device)
            blocks = torch.stack((firsts, torch.zeros_like(firsts)), 1)
        assert into.blocks is not None
        for target, source in ((into.slots, rows.slots), (into.starts, rows.starts), (into.ends, rows.ends)):
            target[:num_rows].copy_(source)
        into.slots[num_rows:] = self._max_rows
        into.starts[num_rows:] = 0
        into.ends[num_rows:] = rows.ends[-1]
        into.blocks[: len(blocks)].copy_(blocks)
        into.blocks[len(blocks) :, 1] = _BEHIND_ALL

    def release(self) -> None:
        """Free the memory; nothing may be computed after this."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
