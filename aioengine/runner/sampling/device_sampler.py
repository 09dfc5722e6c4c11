"""Sampling on a GPU. The host prepares the parameters of each row, and never waits for tokens.

The rules and random numbers are the same as in ``sampler``. Probabilities are summed in another order, so a random
number between two tokens may select the other token. The token of a row depends only on its logits, parameters, seed
and position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.kernels.triton.launcher import compile_only
from aioengine.kernels.triton.logits import mask
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, SamplingKernels
from aioengine.runner.logits import LogitsProcessor, apply_processors
from aioengine.runner.logits.token_processors import Penalties
from aioengine.runner.sampling.token_counts import TokenCounts
from aioengine.settings.memory_model import SAMPLED_ROWS

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.request_row import SampledRows
    from aioengine.runner.rows import RowTable

_LOW_WORD = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)


def fill_fields(rows: SampledRows, out: npt.NDArray[np.int32]) -> None:
    """Fill ``kernels.triton.sampling.Draws.fields`` [5, S] for these rows."""
    records = rows.records
    seeds, temperatures = records["seed"], records["temperature"]
    is_greedy = records["is_greedy"]
    out[0] = (seeds & _LOW_WORD).astype(np.uint32).view(np.int32)
    out[1] = (seeds >> _HIGH_SHIFT).astype(np.uint32).view(np.int32)
    out[2] = rows.positions
    out[3] = (1.0 / np.where(is_greedy, np.float32(1.0), temperatures)).astype(np.float32).view(np.int32)
    out[4] = is_greedy


def is_simple(rows: SampledRows, *, aside_from: int = 0) -> bool:
    """Return whether all rows need only a temperature. aside_from: bits of processors to ignore."""
    records = rows.records
    processors = records["processors"] & ~aside_from
    return not (processors.any() or (records["is_truncated"] & ~records["is_greedy"]).any())


class DeviceSampler:
    """Samples tokens below ``vocab_size``. The logits may be wider (``num_embeddings``)."""

    def __init__(
        self, *, vocab_size: int, num_embeddings: int, table: RowTable, processors: tuple[LogitsProcessor, ...]
    ) -> None:
        self._vocab_size = vocab_size
        counts = TokenCounts(table, width=num_embeddings)
        self._processors = [counts if isinstance(processor, Penalties) else processor for processor in processors]
        self._device = table.last_tokens.device
        self._upload = table.upload
        self._kernels = SamplingKernels(max_rows=SAMPLED_ROWS, vocab_size=vocab_size, device=self._device)

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Sample one token id per row of logits [S, >= V] -> [S] int64 on the same device; -1 for a bad row."""
        num_rows = len(logits)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        host_fields = np.empty((NUM_FIELDS, num_rows), dtype=np.int32)
        fill_fields(rows, host_fields)
        fields = self._upload(host_fields)
        is_truncated = rows.records["is_truncated"] & ~rows.records["is_greedy"]
        for start in range(0, num_rows, SAMPLED_ROWS):
            part = slice(start, start + SAMPLED_ROWS)
            scores = logits[part]
            if rows.records["processors"][part].any():
                scores = self._process(scores, rows, start)
            rules = self._rules(rows, np.flatnonzero(is_truncated[part]), start)
            self._kernels.sample(scores, Draws(fields[:, part], rules), token_ids[part])
        return token_ids

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [S, >= V] of these rows -> [S, V] after the processors; unchanged if no row has a processor."""
        scores = self._process(logits, rows, 0) if rows.records["processors"].any() else logits
        return scores[:, : self._vocab_size]

    def _rules(
        self, rows: SampledRows, chosen: npt.NDArray[np.int64], start: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return ``Draws.rules`` of the rows ``chosen`` [X], counted from ``start``; None: there are none."""
        if not chosen.size:
            return None
        records = rows.records[start + chosen]
        return (
            self._upload(chosen.astype(np.int32)),
            self._upload(records["top_k"].astype(np.int32)),
            self._upload(records["top_p"].astype(np.float32)),
            self._upload(records["min_p"].astype(np.float32)),
        )

    def _process(self, logits: Tensor, rows: SampledRows, start: int) -> Tensor:
        """Return a copy of logits [S, W], of the rows from ``start`` on, in fp32 after the processors.

        The copy has the full width, because the parameters of requests may contain ids that are never sampled.
        """
        scores = logits.to(torch.float32, copy=True)
        chosen = np.arange(start, start + len(logits))
        apply_processors(self._processors, scores, rows, chosen, self._upload)
        return scores


def compile_kernels(*, vocab_size: int, num_embeddings: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile all kernels that ``DeviceSampler`` and CUDA graphs may launch for logits of this dtype."""
    with compile_only():
        kernels = SamplingKernels(max_rows=1, vocab_size=vocab_size, device=device)
        logits = torch.zeros(1, num_embeddings, dtype=dtype, device=device)
        kernels.run_all(logits)
        masks = torch.zeros(1, -(-num_embeddings // 32), dtype=torch.int32, device=device)
        rules = torch.zeros(1, 2, dtype=torch.int32, device=device)
        for scores in (logits, logits.float()):  # logits of a graph, and an fp32 copy
            mask(scores, rules, masks)
