"""Recurrent states per request, which some layers keep instead of keys and values.

Shape letters: L layers with a state, N slots, R rows, B blocks of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aioengine.kernels.state_types import BLOCK_TOKENS, StateRows

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Ints = npt.NDArray[np.int64]


class StateTensor(NamedTuple):
    """Shape and dtype of one tensor of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shapes of the states of a request.

    Attributes:
        num_layers: L.
        tensors: the tensors of each layer.
    """

    num_layers: int
    tensors: tuple[StateTensor, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the states of one request."""
        return self.num_layers * sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)

    def one_row(self, num_tokens: int, device: torch.device) -> StepStates:
        """Return states for one row of ``num_tokens`` tokens from position 0.

        All layers share the memory of one layer, so use it only if the results of the step are dropped.
        """
        pool = tuple(
            torch.zeros(1, 1, *tensor.shape, dtype=tensor.dtype, device=device).expand(
                self.num_layers, 1, *tensor.shape
            )
            for tensor in self.tensors
        )
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        blocks = token_blocks(np.array([num_tokens])) if device.type != "cpu" and num_tokens > 1 else None
        on_device = None if blocks is None else torch.from_numpy(blocks).to(device)
        return StepStates(pool, StateRows(zero, zero, zero + num_tokens, on_device))


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states that the layers of a step read and write.

    Attributes:
        pool: one tensor [L, N, ...] per tensor of a layer's state.
        rows: the rows of the step.
    """

    pool: tuple[Tensor, ...]
    rows: StateRows


def token_blocks(counts: Ints) -> npt.NDArray[np.int32]:
    """Return ``StateRows.blocks`` [B, 2] for rows with ``counts`` [R] tokens."""
    num_blocks = -(-counts // BLOCK_TOKENS)
    rows = np.repeat(np.arange(len(counts)), num_blocks)
    ends = num_blocks.cumsum()
    indices = np.arange(int(ends[-1])) - (ends - num_blocks)[rows]
    return np.stack((rows, indices * BLOCK_TOKENS), axis=1).astype(np.int32)
