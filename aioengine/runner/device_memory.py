"""How much of a GPU's memory the KV pool may take: what a step needs beside it is measured, not guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.models._base import Model

GRAPHS_BYTES = 2 << 30
"""Kept for the workspaces of kernels and for the graphs, whose shared pool is about as large as a decode step."""


class _NoAttention:
    """Passes the queries on: attention of a step needs no more memory than its output."""

    def prepare(self, batch: object) -> None:
        """Nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return self.attend(q, layer)

    def target(self, layer: int) -> None:
        """Nothing is written."""

    def attend(self, q: Tensor, layer: int) -> Tensor:
        return q.reshape(q.shape[0], -1).clone()


@torch.inference_mode()
def peak_memory(model: Model, device: torch.device, *, num_tokens: int, num_rows: int) -> int:
    """Bytes that a step of so many tokens, of which ``num_rows`` give logits, takes beside weights and pool.

    Raises:
        torch.OutOfMemoryError: not even that step fits.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = model.forward(ids, ids, _NoAttention())
    logits = model.compute_logits(hidden[:num_rows])
    del hidden, logits
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak + GRAPHS_BYTES


def left_on_device(device: torch.device, *, fraction: float) -> int:
    """Bytes that may still be taken when ``fraction`` of the whole memory is for weights, pool and steps."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1.0 - fraction) * total)
