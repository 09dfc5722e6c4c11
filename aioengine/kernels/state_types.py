"""Types of the operations with states. R rows, T packed tokens, B blocks, H heads."""

from __future__ import annotations

from typing import Final, NamedTuple

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


class DeltaGates(NamedTuple):
    """Inputs of the gated delta rule: g = -exp(log_rate) * softplus(steps + bias), and beta = sigmoid(scores).

    g is the logarithm of the decay.

    Attributes:
        steps, scores: [T, H], any row stride, the same for both.
        log_rate, bias: [H] fp32.
    """

    steps: Tensor
    scores: Tensor
    log_rate: Tensor
    bias: Tensor


class SpaceWeights(NamedTuple):
    """The weights of a Mamba 2 layer, see ``kernels.state_space``.

    Attributes:
        log_rate: [H] fp32, logarithm of the decay rate.
        bias: [H] fp32, bias of the time steps.
        skip: [H] fp32, factor of the skip connection.
        limits: minimum and maximum time step.
    """

    log_rate: Tensor
    bias: Tensor
    skip: Tensor
    limits: tuple[float, float]
