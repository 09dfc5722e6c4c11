"""The base class of attention and of the layers that replace it, and the recurrent states of the latter.

Shape letters: T tokens, S selected tokens, D hidden size, P outputs of the first matmul, I inputs of the last one.
States: L layers with a state, N slots, R rows, B blocks of tokens.
"""

from __future__ import annotations

import math
from abc import ABCMeta, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import StepAttention
from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.kernels.heads import RotaryTables
from aioengine.kernels.state_types import BLOCK_TOKENS, StateRows
from aioengine.layers.adapters import AdapterRows, Grouping
from aioengine.layers.layer import Layer
from aioengine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class BlockStep:
    """The arguments of all blocks in a step.

    Attributes:
        tables: the tables of each rotary embedding of the model.
        adapters: None if no row has an adapter.
        states: None for a model without recurrent states.
    """

    tables: list[RotaryTables]
    attention: StepAttention
    adapters: AdapterRows | None = None
    states: StepStates | None = None

    def grouping(self, outputs: Tensor | None) -> Grouping | None:
        """Return the tokens ``outputs`` [S] (None: all) by adapter; None if no row has an adapter."""
        if self.adapters is None:
            return None
        return self.adapters.tokens if outputs is None else self.adapters.outputs

    def state(self, layer: int) -> tuple[list[Tensor], StateRows]:
        """Return the states of a layer, tensors [N, ...] of N slots, and the rows of the step."""
        assert self.states is not None, "a model with recurrent states needs them in each step"
        return [tensor[layer] for tensor in self.states.pool], self.states.rows


class Mixer(Layer, metaclass=ABCMeta):
    """Mixes the tokens of a request: [T, D] -> [T, D], or [S, D] for selected tokens.

    Subclasses set the first and the last matmul.
    """

    _input: Linear
    _output: Linear

    def __call__(self, x: Tensor, step: BlockStep, layer: int, *, outputs: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [S, D] with ``outputs``. The KV cache and the states are updated for all tokens.

        Args:
            layer: index of this layer among the layers with keys and values, or with a state.
            outputs: [S] int64 indices of the selected tokens; None for all.
        """
        mixed = self.mix(self._input(x, step.grouping(None)), step, layer)
        if outputs is not None:
            mixed = tuple(part.index_select(0, outputs) for part in mixed)
        return self._output(self.finish(*mixed), step.grouping(outputs))

    @abstractmethod
    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, ...]:
        """Update the KV cache or the states of a layer. projected [T, P] -> arguments of ``finish`` [T, ...]."""

    @abstractmethod
    def finish(self, *mixed: Tensor) -> Tensor:
        """Results of ``mix`` for the selected tokens [S, ...] -> inputs of the last matmul [S, I]."""


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


def token_blocks(counts: Ints64) -> Ints32:
    """Return ``StateRows.blocks`` [B, 2] for rows with ``counts`` [R] tokens."""
    num_blocks = -(-counts // BLOCK_TOKENS)
    rows = np.repeat(np.arange(len(counts)), num_blocks)
    ends = num_blocks.cumsum()
    indices = np.arange(int(ends[-1])) - (ends - num_blocks)[rows]
    return np.stack((rows, indices * BLOCK_TOKENS), axis=1).astype(np.int32)
