"""The states that the rows of a step read and write. R rows, T packed tokens, B blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_TOKENS: Final = 64
"""Tokens per block in the GPU kernels."""


class StateRows(NamedTuple):
    """The rows of a step. Their tokens are packed, one row after the other.

    A row that starts at position 0 uses a zero state, whatever its slot holds.

    Attributes:
        slots: [R], index of the state of each row in the pool.
        starts: [R], number of earlier tokens in the state of each row.
        ends: [R], end of the tokens of each row among the packed tokens.
        blocks: [B, 2] int32 on a GPU: row and first token (counted within the row) of each block of up to
            ``BLOCK_TOKENS`` tokens; None: every row has one token, or the device is a CPU. The inputs of CUDA graphs
            are padded with empty rows, tokens after the last row, and blocks that start after the end of their row.
            The outputs of padding tokens are 0.
    """

    slots: Tensor
    starts: Tensor
    ends: Tensor
    blocks: Tensor | None = None

    def on_host(self) -> list[tuple[int, int, int, int]]:
        """Return (slot, start, first token, end of its tokens) of each row. Waits for the device."""
        ends = self.ends.tolist()
        return list(zip(self.slots.tolist(), self.starts.tolist(), [0, *ends[:-1]], ends, strict=True))
