"""Which rows of a step read and write which states. R rows, T packed tokens of the step, B blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_TOKENS: Final = 64
"""Tokens of a row that the kernels of a GPU compute together."""


class StateRows(NamedTuple):
    """The rows of a step, whose tokens are packed one row after the other.

    A state is that of a row's tokens so far. That of a row at its start is zero, whatever its slot holds.

    Attributes:
        slots: [R], which entry of the pool has the state of each row.
        starts: [R], the tokens of each row that its state has seen.
        ends: [R], where the tokens of a row end among those of the step.
        blocks: [B, 2] int32 on a GPU, the row of each block of up to ``BLOCK_TOKENS`` tokens, and its first token,
            counted in its row; None: every row has one token, or this is a CPU. Rows without tokens, tokens behind
            those of the last row, and blocks that begin behind their row pad the input of CUDA graphs; the outputs of
            such tokens are 0.
    """

    slots: Tensor
    starts: Tensor
    ends: Tensor
    blocks: Tensor | None = None

    def on_host(self) -> list[tuple[int, int, int, int]]:
        """Slot, start, first token and end of the tokens of each row. Waits for the device."""
        ends = self.ends.tolist()
        return list(zip(self.slots.tolist(), self.starts.tolist(), [0, *ends[:-1]], ends, strict=True))
