"""CUDA graphs of short encoder steps. One graph has the whole forward pass.

Without a graph, the host needs several times as long to launch the kernels of a short step as the device needs to
compute them. A graph has a fixed number of tokens, so a step is padded to the next size of ``piece_ladder``. Padding
tokens belong to no row and do not affect results: attention does not read them, and all other operations are per token.
All inputs of a step are copied to the device in one transfer.

T tokens and R rows of a graph, D model size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import ForwardBatch, FullGraphAttention
from aioengine.models._base import Model, ModelInputs
from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.timing import profiled

TOKENS_PER_ROW = 16
"""Number of tokens of a graph per row. More rows would be slower, because attention starts programs for each row."""
MIN_ROWS = 8
"""Minimum number of rows of a graph, if it has as many tokens and a step may have as many rows."""


class EncoderStep:
    """The CUDA graph of a step of up to T tokens in up to R rows, and the memory that it reads and writes.

    Attributes:
        token_ids, positions, token_types: [T] int64, views of one tensor.
        outputs: [R] int64, index of the token of each row whose hidden state is returned; a view of the same tensor.
        starts: [R + 1] int32, start of each row and end of the last one; a view of the same tensor.
        hidden: the result: [R, D] of one token per row, or with ``returns_all`` [T, D] of all tokens.
    """

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device, *, returns_all: bool) -> None:
        self.num_tokens, self.num_rows = num_tokens, num_rows
        self._memory = torch.zeros(3 * num_tokens + num_rows + num_rows // 2 + 1, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.token_types = self._memory[: 3 * num_tokens].split(num_tokens)
        self.outputs, starts = self._memory[3 * num_tokens :].split((num_rows, num_rows // 2 + 1))
        self.starts = starts.view(torch.int32)[: num_rows + 1]
        self.returns_all = returns_all
        self.graph = torch.cuda.CUDAGraph()
        self.hidden = torch.empty(0)

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue a step that fits into the graph. Return ``hidden`` ([R, D] or [T, D]) without the padding.

        ``inputs`` are on the host. Without ``inputs.outputs``, all tokens are returned, or all rows have one token.
        """
        lengths, num_tokens, size = batch.query_lengths, len(inputs.positions), self.num_tokens
        num_rows = len(lengths)
        with profiled("prepare"):
            assert inputs.token_ids is not None, "an encoder reads token ids"
            filled = torch.zeros(len(self._memory), dtype=torch.int64, pin_memory=self._memory.is_cuda)
            column = filled.numpy()
            column[:num_tokens] = inputs.token_ids.numpy()
            column[size : size + num_tokens] = inputs.positions.numpy()
            if inputs.token_types is not None:
                column[2 * size : 2 * size + num_tokens] = inputs.token_types.numpy()
            outputs = np.arange(num_rows) if inputs.outputs is None else inputs.outputs.numpy()[:num_rows]
            column[3 * size : 3 * size + num_rows] = outputs
            starts = column[3 * size + self.num_rows :].view(np.int32)
            starts[1:] = num_tokens  # padding rows are empty
            np.cumsum(lengths, out=starts[1 : num_rows + 1])
            self._memory.copy_(filled, non_blocking=True)
        self.graph.replay()
        return self.hidden[: num_tokens if self.returns_all else num_rows]


class EncoderGraphs:
    """The CUDA graphs of an encoder, one for each number of tokens.

    Args:
        max_rows: maximum number of rows of a step. max_length: number of tokens of the longest row.
        returns_all: return the hidden states of all tokens instead of one token per row.
    """

    def __init__(
        self, model: Model, attention: FullGraphAttention, *, max_rows: int, max_length: int, returns_all: bool
    ) -> None:
        self._model = model
        self._attention = attention
        self._max_rows = max_rows
        self._max_length = max_length
        self._returns_all = returns_all
        self._device = attention.device
        self._stream = torch.cuda.Stream(self._device)
        self._steps: list[EncoderStep] = []  # ascending

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture the sizes up to ``max_tokens``. ``report(num_captured, num_sizes)`` is called after each capture."""
        sizes = piece_ladder(max_tokens)
        pool = torch.cuda.graph_pool_handle()
        for num_done, size in enumerate(reversed(sizes), 1):
            self._steps.insert(0, self._captured(size, pool))
            report(num_done, len(sizes))

    def find(self, num_rows: int, num_tokens: int) -> EncoderStep | None:
        """Return the smallest graph with at least this many rows and tokens; None: there is none."""
        return next((step for step in self._steps if num_tokens <= step.num_tokens and num_rows <= step.num_rows), None)

    def _captured(self, size: int, pool: torch.cuda._POOL_HANDLE) -> EncoderStep:
        num_rows = min(max(size // TOKENS_PER_ROW, MIN_ROWS), size, self._max_rows)
        step, spec = EncoderStep(size, num_rows, self._device, returns_all=self._returns_all), self._model.input_spec
        inputs = ModelInputs(
            positions=step.positions,
            token_ids=step.token_ids,
            token_types=step.token_types if spec.token_types else None,
            outputs=None if step.returns_all else step.outputs,
        )
        attention = self._attention.fixed_rows(step.starts, min(size, self._max_length))
        self._model.forward(inputs, attention)  # kernels must not be compiled or loaded during the capture
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            step.graph.capture_begin(pool=pool)
            step.hidden = self._model.forward(inputs, attention)
            step.graph.capture_end()
        step.graph.replay()  # the first replay takes longer than later ones
        return step
