"""CUDA graphs of short steps with prompts: launched kernel by kernel, these cost the host more time than the device.

There is a graph for each of a ladder of token counts; a step of fewer tokens is padded to the next with tokens of no
row, whose keys and values go to the padding page. A graph ends with the hidden states of the last tokens of its rows.

T tokens of a graph, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.runner.ladder import MAX_PROMPT_ROWS, prefill_ladder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import CapturablePrefill, FixedPrefill, ForwardBatch
    from aioengine.models._base import Model


@dataclass(frozen=True, slots=True)
class _Graph:
    """One captured step, with the memory that it reads and writes: [T], and ``hidden`` [MAX_PROMPT_ROWS, D]."""

    graph: torch.cuda.CUDAGraph
    attention: FixedPrefill
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last_tokens: Tensor
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
        captured: dict[int, _Graph] = {}
        for num_done, size in enumerate(reversed(sizes), 1):
            captured[size] = self._captured(size, pool)
            report(num_done, len(sizes))
        self._graphs = {size: captured[size] for size in sizes}

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for this step."""
        num_rows, num_tokens = len(batch.query_lengths), len(batch.input_ids)
        return num_rows <= MAX_PROMPT_ROWS and any(num_tokens <= size for size in self._graphs)

    def replay(self, batch: ForwardBatch) -> Tensor:
        """Queue the step, which must fit; gives the hidden states of the last token of each of its rows."""
        num_rows, num_tokens = len(batch.query_lengths), len(batch.input_ids)
        chosen = next(graph for size, graph in self._graphs.items() if num_tokens <= size)
        chosen.input_ids[:num_tokens].copy_(batch.input_ids)
        chosen.positions[:num_tokens].copy_(batch.positions)
        chosen.slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        chosen.slot_mapping[num_tokens:].zero_()  # a slot of the padding page
        chosen.last_tokens[:num_rows].copy_(batch.last_tokens)
        chosen.attention.plan(batch)
        chosen.graph.replay()
        return chosen.hidden[:num_rows]

    def _captured(self, size: int, pool: torch.cuda._POOL_HANDLE) -> _Graph:
        input_ids, positions, slot_mapping = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        last_tokens = torch.zeros(MAX_PROMPT_ROWS, dtype=torch.int64, device=self._device)
        attention = self._attention.fixed_prefill(slot_mapping, num_rows=MAX_PROMPT_ROWS, max_pages=self._max_pages)

        def compute() -> Tensor:
            return self._model.forward(input_ids, positions, attention, last_tokens)

        compute()  # kernels that are compiled or chosen when they first run must not do so while being captured
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = compute()
        return _Graph(graph, attention, input_ids, positions, slot_mapping, last_tokens, hidden)
