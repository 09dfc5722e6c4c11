"""The state pool: memory for the states of running requests. N slots, R rows, L layers."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.kernels.state_types import BLOCK_TOKENS, StateRows
from aioengine.layers.mixer import StateShape, StepStates, token_blocks
from aioengine.runner.transfer import Upload

_NO_TOKENS: Final = 1 << 30
"""The first token of an empty block: after the end of every row."""


def _num_blocks(num_tokens: int, num_rows: int) -> int:
    """Return the maximum number of blocks of ``num_rows`` rows with ``num_tokens`` tokens."""
    return num_tokens // BLOCK_TOKENS + num_rows


def states_for_graph(states: StepStates, num_tokens: int, num_rows: int) -> StepStates:
    """Return views of ``StatePool.padded`` for a graph of ``num_tokens`` tokens and ``num_rows`` rows."""
    slots, starts, ends, blocks = states.rows
    assert blocks is not None
    num_blocks = _num_blocks(num_tokens, num_rows)
    return StepStates(states.pool, StateRows(slots[:num_rows], starts[:num_rows], ends[:num_rows], blocks[:num_blocks]))


class StatePool:
    """The states of open requests. The slot of a request is its row index.

    States are never cleared: a row that starts at position 0 treats its state as zero. Steps read and write in launch
    order, so a slot can be reused while the last step of the previous request still runs.

    Snapshots are copies of states in further slots. They are read and written between steps, in launch order.

    Attributes:
        tensors: [L, N, ...] for each tensor of a layer. Slots: ``max_rows`` requests, 1 for padding rows of CUDA
            graphs, then snapshots.
        facts: capacity and memory.
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
        self._copy(max_rows, max_rows)  # loads the GPU kernel

    def take_snapshot(self, row_index: int, snapshot_id: int) -> None:
        """Queue a copy of the state of a row to a snapshot, after all launched steps."""
        self._copy(row_index, self._max_rows + 1 + snapshot_id)

    def restore(self, snapshot_id: int, row_index: int) -> None:
        """Queue a copy of a snapshot to the state of a row."""
        self._copy(self._max_rows + 1 + snapshot_id, row_index)

    def _copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[:, target].copy_(tensor[:, source])

    def of_step(self, row_indices: Ints64, starts: Ints64, counts: Ints64, upload: Upload) -> StepStates:
        """Return the states of the rows [R], which compute ``counts`` tokens from positions ``starts`` on."""
        blocks = None
        if self.tensors[0].is_cuda and counts.max() > 1:
            blocks = upload(token_blocks(counts))
        rows = StateRows(upload(row_indices), upload(starts), upload(counts.cumsum()), blocks)
        return StepStates(self.tensors, rows)

    def of_graph(self, row_indices: Tensor, positions: Tensor, is_padding: Tensor) -> StepStates:
        """Return the states of rows of one token in a CUDA graph: row_indices, positions, is_padding [R]."""
        slots = torch.where(is_padding, self._max_rows, row_indices)
        ends = torch.arange(1, len(slots) + 1, device=slots.device)
        return StepStates(self.tensors, StateRows(slots, positions, ends))

    def padded(self, num_tokens: int, num_rows: int) -> StepStates:
        """Return the states of up to ``num_rows`` rows with up to ``num_tokens`` tokens, in memory with fixed
        addresses. ``fill`` writes them.
        """
        device = self.tensors[0].device
        slots, starts, ends = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        blocks = torch.zeros(_num_blocks(num_tokens, num_rows), 2, dtype=torch.int32, device=device)
        return StepStates(self.tensors, StateRows(slots, starts, ends, blocks))

    def fill(self, into: StateRows, rows: StateRows) -> None:
        """Write the rows of a step to the memory of ``padded``, or to a part of it."""
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
        into.blocks[len(blocks) :, 1] = _NO_TOKENS

    def release(self) -> None:
        """Free the memory. No step may run until ``resume``."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocate the memory again. On a GPU it would have other addresses than in CUDA graphs."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
