"""Which steps with prompts are CUDA graphs: short ones of few rows whole, all others up to a size in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.attention._base import CapturablePrefill, PiecewiseAttention
from aioengine.protocol.messages import Progress
from aioengine.runner.graphs.ladder import MAX_PROMPT_ROWS
from aioengine.runner.graphs.piece_graphs import PieceGraphs
from aioengine.runner.graphs.prefill_graphs import PrefillGraphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import ForwardBatch
    from aioengine.models._base import ModelInputs
    from aioengine.runner.model_runner import DeviceParts


class PromptGraphs(Protocol):
    """Graphs of some steps with prompts."""

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether this step is one of them."""
        ...

    def replay(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Queue a step that is; gives the hidden states of the last token of each of its rows."""
        ...


@torch.inference_mode()
def capture_prompt_graphs(
    parts: DeviceParts, max_tokens: int, report: Callable[[Progress], None]
) -> list[PromptGraphs]:
    """The graphs of steps of up to so many tokens that attention is made for; of two that fit, the first is faster."""
    captured: list[PromptGraphs] = []
    attention = parts.attention
    if isinstance(attention, CapturablePrefill):
        # their page tables have room for the longest request in each row, and the largest is planned over pages
        longest = min(max_tokens, MAX_PROMPT_ROWS * parts.context_length)
        whole = PrefillGraphs(parts.model, attention, max_pages=parts.max_row_pages, device=parts.device)
        whole.capture(longest, lambda done, total: report(Progress("capturing CUDA graphs of prompts", done, total)))
        captured.append(whole)
    if isinstance(attention, PiecewiseAttention):
        pieces = PieceGraphs(parts.model, attention, parts.kv_pool.tensor, max_rows=parts.max_rows)
        pieces.capture(
            max_tokens, lambda done, total: report(Progress("capturing CUDA graphs of large steps", done, total))
        )
        captured.append(pieces)
    return captured
