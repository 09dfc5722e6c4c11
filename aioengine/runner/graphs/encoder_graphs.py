"""CUDA graphs of short steps of encoders, each the whole forward pass.

Launched kernel by kernel, such a step takes the host several times as long as the device. So it is padded to the next
token count of a ladder, with tokens of no row: attention reads none of them, and every other operation keeps the tokens
apart, so whatever they hold reaches no row. The inputs of a step are copied to the device at once.

T tokens of a graph, R rows, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.models._base import ModelInputs
from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import ForwardBatch, FullGraphAttention
    from aioengine.models._base import InputSpec, Model

TOKENS_PER_ROW = 16
"""Tokens of a graph for each of its rows: attention starts a program for each row and part of the longest one."""
LEAST_ROWS = 8


class _Columns:
    """The inputs of a step of T tokens and R rows in one int64 column on the device.

    Attributes:
        memory: all of them. token_ids, positions, token_types: [T]. outputs: [R]. starts: [R + 1] int32, where the rows
            begin and the last ends.
    """

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device) -> None:
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self.memory = torch.zeros(3 * num_tokens + num_rows + num_rows // 2 + 1, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.token_types = self.memory[: 3 * num_tokens].split(num_tokens)
        self.outputs, starts = self.memory[3 * num_tokens :].split((num_rows, num_rows // 2 + 1))
        self.starts = starts.view(torch.int32)[: num_rows + 1]

    def inputs(self, spec: InputSpec, *, gives_all: bool) -> ModelInputs:
        return ModelInputs(
            positions=self.positions,
            token_ids=self.token_ids,
            token_types=self.token_types if spec.token_types else None,
            outputs=None if gives_all else self.outputs,
        )

    def fill(self, inputs: ModelInputs, lengths: list[int]) -> None:
        """Copy a step that is no larger, whose inputs are on the host. Without outputs, those of rows of one token."""
        num_tokens, num_rows, size = len(inputs.positions), len(lengths), self.num_tokens
        assert inputs.token_ids is not None, "an encoder reads token ids"
        filled = torch.zeros(len(self.memory), dtype=torch.int64, pin_memory=self.memory.is_cuda)
        column = filled.numpy()
        column[:num_tokens] = inputs.token_ids.numpy()
        column[size : size + num_tokens] = inputs.positions.numpy()
        if inputs.token_types is not None:
            column[2 * size : 2 * size + num_tokens] = inputs.token_types.numpy()
        outputs = np.arange(num_rows) if inputs.outputs is None else inputs.outputs.numpy()[:num_rows]
        column[3 * size : 3 * size + num_rows] = outputs
        starts = column[3 * size + self.num_rows :].view(np.int32)
        starts[1:] = num_tokens  # rows that are not there are empty
        np.cumsum(lengths, out=starts[1 : num_rows + 1])
        self.memory.copy_(filled, non_blocking=True)


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """A captured step, and the memory that it reads and writes.

    Attributes:
        hidden: [R, D] of one token of each row; with ``gives_all`` [T, D].
    """

    graph: torch.cuda.CUDAGraph
    columns: _Columns
    hidden: Tensor
    gives_all: bool

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue a step that is no larger, with inputs on the host; returns hidden states [R, D], or [T, D]."""
        num_rows, num_tokens = len(batch.query_lengths), len(inputs.positions)
        with part("prepare"):
            self.columns.fill(inputs, batch.query_lengths)
        self.graph.replay()
        return self.hidden[: num_tokens if self.gives_all else num_rows]


class EncoderGraphs:
    """The graphs of a model.

    Args:
        max_rows: of a step. max_length: tokens of the longest row.
        gives_all: they give hidden states of all tokens, not of one token of each row.
    """

    def __init__(
        self,
        model: Model,
        attention: FullGraphAttention,
        *,
        max_rows: int,
        max_length: int,
        gives_all: bool,
    ) -> None:
        self._model = model
        self._attention = attention
        self._max_rows = max_rows
        self._max_length = max_length
        self._gives_all = gives_all
        self._device = attention.device
        self._stream = torch.cuda.Stream(self._device)
        self._steps: list[EncoderStep] = []  # ascending

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture the ladder up to ``max_tokens``; ``report`` receives the numbers of captured and of all sizes."""
        sizes = piece_ladder(max_tokens)
        pool = torch.cuda.graph_pool_handle()
        captured: list[EncoderStep] = []
        for num_done, size in enumerate(reversed(sizes), 1):
            captured.append(self._captured(size, pool))
            report(num_done, len(sizes))
        self._steps = captured[::-1]

    def of_size(self, num_rows: int, num_tokens: int) -> EncoderStep | None:
        """The smallest graph with at least this many rows and tokens; None: there is none."""
        for step in self._steps:
            if num_tokens <= step.columns.num_tokens and num_rows <= step.columns.num_rows:
                return step
        return None

    def _captured(self, size: int, pool: torch.cuda._POOL_HANDLE) -> EncoderStep:
        num_rows = min(max(size // TOKENS_PER_ROW, LEAST_ROWS), size, self._max_rows)
        columns = _Columns(size, num_rows, self._device)
        inputs = columns.inputs(self._model.input_spec, gives_all=self._gives_all)
        attention = self._attention.fixed_rows(columns.starts, min(size, self._max_length))
        self._model.forward(inputs, attention)  # no kernel must be compiled or loaded during the capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool)
            hidden = self._model.forward(inputs, attention)
            graph.capture_end()
        graph.replay()  # for the first time, which takes longer
        return EncoderStep(graph, columns, hidden, self._gives_all)
