"""CUDA graphs of short steps of encoders, each the whole forward pass.

Launched kernel by kernel, such a step takes the host several times as long as the device. So it is padded to the next
token count of a ladder, with tokens of no row: attention reads none of them, and every other operation keeps the tokens
apart, so whatever they hold reaches no row.

T tokens of a graph, R rows, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.runner.graphs.ladder import piece_ladder
from aioengine.runner.graphs.padded_inputs import PaddedInputs
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import FixedRows, ForwardBatch, WholeAttention
    from aioengine.models._base import Model, ModelInputs

TOKENS_PER_ROW = 16
"""A graph has a row for so many of its tokens: attention starts a program for each row and part of the longest one."""
LEAST_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step, and the memory that it reads and writes: ``hidden`` [R, D], or [T, D] of all tokens."""

    graph: torch.cuda.CUDAGraph
    num_rows: int
    inputs: PaddedInputs
    attention: FixedRows
    hidden: Tensor


class EncoderGraphs:
    """The graphs of a model.

    Args:
        max_rows: of a step. max_length: tokens of the longest row.
        gives_all: they give hidden states of all tokens, not of one token of each row.
    """

    def __init__(
        self, model: Model, attention: WholeAttention, *, max_rows: int, max_length: int, gives_all: bool
    ) -> None:
        self._model = model
        self._attention = attention
        self._max_rows = max_rows
        self._max_length = max_length
        self.gives_all = gives_all
        self._device = attention.device
        self._stream = torch.cuda.Stream(self._device)
        self._graphs: dict[int, _Graph] = {}  # ascending

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture the ladder up to ``max_tokens``; ``report`` receives the numbers of captured and of all sizes."""
        sizes = piece_ladder(max_tokens)
        rows = {size: min(max(size // TOKENS_PER_ROW, LEAST_ROWS), size, self._max_rows) for size in sizes}
        inputs = PaddedInputs.zeros(
            self._model, max_tokens, max(rows.values(), default=0), self._device, gives_all=self.gives_all
        )
        pool = torch.cuda.graph_pool_handle()
        captured: dict[int, _Graph] = {}
        for num_done, size in enumerate(reversed(sizes), 1):
            attention = self._attention.fixed_rows(rows[size], min(size, self._max_length))
            step = inputs.first(size, rows[size])
            self._model.forward(step.inputs, attention)  # no kernel must be compiled or loaded during the capture
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=pool)
                hidden = self._model.forward(step.inputs, attention)
                graph.capture_end()
            graph.replay()  # for the first time, which takes longer
            captured[size] = _Graph(graph, rows[size], step, attention, hidden)
            report(num_done, len(sizes))
        self._graphs = {size: captured[size] for size in sizes}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for this step."""
        return self._chosen(batch) is not None

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue the step, which must fit; returns hidden states [R, D] of its outputs, or [T, D]."""
        chosen = self._chosen(batch)
        assert chosen is not None, "the step does not fit"
        with part("prepare"):
            chosen.inputs.fill(inputs, batch)
            chosen.attention.fill(batch.query_lengths)
        chosen.graph.replay()
        return chosen.hidden[: len(batch.slot_mapping if self.gives_all else batch.query_lengths)]

    def _chosen(self, batch: ForwardBatch) -> _Graph | None:
        num_rows, num_tokens = len(batch.query_lengths), len(batch.slot_mapping)
        fitting = (graph for size, graph in self._graphs.items() if num_tokens <= size and num_rows <= graph.num_rows)
        return next(fitting, None)
