"""CUDA graphs of short steps with prompts: launched kernel by kernel, these cost the host more time than the device.

There is a graph for each of a ladder of token counts; a step of fewer tokens is padded to the next with tokens of no
row, whose keys and values go to the padding page. A graph ends with the hidden states of the last tokens of its rows.

T tokens of a graph, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.runner.graphs.ladder import MAX_PROMPT_ROWS, prefill_ladder
from aioengine.runner.graphs.padded_inputs import PaddedInputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import CapturablePrefill, FixedPrefill, ForwardBatch
    from aioengine.models._base import Model, ModelInputs


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured step, with the memory that it reads, and ``hidden`` [MAX_PROMPT_ROWS, D], which it writes."""

    graph: torch.cuda.CUDAGraph
    attention: FixedPrefill
    inputs: PaddedInputs
    hidden: Tensor


class PrefillGraphs:
    """The graphs of a model. ``max_pages``: of a request."""

    def __init__(self, model: Model, attention: CapturablePrefill, *, max_pages: int, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._max_pages = max_pages
        self._device = device
        self._graphs: dict[int, _Graph] = {}  # ascending

    def capture(self, max_tokens: int, report: Callable[[int, int], None]) -> None:
        """Capture the ladder up to ``max_tokens``; ``report`` hears how many graphs are done, and of how many."""
        sizes = prefill_ladder(max_tokens)
        pool = torch.cuda.graph_pool_handle()
        inputs = PaddedInputs.zeros(self._model, max_tokens, MAX_PROMPT_ROWS, self._device)
        captured: dict[int, _Graph] = {}
        for num_done, size in enumerate(reversed(sizes), 1):
            captured[size] = self._captured(inputs.first(size, MAX_PROMPT_ROWS), pool)
            report(num_done, len(sizes))
        self._graphs = {size: captured[size] for size in sizes}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for this step."""
        num_rows, num_tokens = len(batch.query_lengths), len(batch.slot_mapping)
        return num_rows <= MAX_PROMPT_ROWS and any(num_tokens <= size for size in self._graphs)

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue the step, which must fit; gives the hidden states of the last token of each of its rows."""
        chosen = next(graph for size, graph in self._graphs.items() if len(batch.slot_mapping) <= size)
        chosen.inputs.fill(inputs, batch)
        chosen.attention.plan(batch)
        chosen.graph.replay()
        return chosen.hidden[: len(batch.query_lengths)]

    def _captured(self, inputs: PaddedInputs, pool: torch.cuda._POOL_HANDLE) -> _Graph:
        slots, max_pages = inputs.slot_mapping, self._max_pages
        attention = self._attention.fixed_prefill(slots, num_rows=MAX_PROMPT_ROWS, max_pages=max_pages)

        def compute() -> Tensor:
            return self._model.forward(inputs.inputs, attention)

        compute()  # kernels that are compiled or chosen when they first run must not do so while being captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = compute()
        return _Graph(graph, attention, inputs, hidden)
