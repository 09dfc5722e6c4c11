"""Sampling on a GPU. The host prepares the parameters of each row, and never waits for tokens.

The rules and random numbers are the same as in ``sampler``. Probabilities are summed in another order, so a random
number between two tokens may select the other token. The token of a row depends only on its logits, parameters, seed
and position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.kernels.triton.launcher import compile_only
from aioengine.kernels.triton.logits import IN_PROMPT, PenalizedRows, mask, penalize
from aioengine.kernels.triton.sampling import NUM_FIELDS, Draws, SamplingKernels
from aioengine.protocol.messages import Sampling
from aioengine.runner.logits import apply_processors
from aioengine.runner.logits.token_processors import Penalties
from aioengine.runner.request_row import LogitsRow, RequestRow, SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.transfer import Upload
from aioengine.settings.memory_model import SAMPLED_ROWS

_LOW_WORD = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)


def fill_fields(rows: SampledRows, out: Ints32) -> None:
    """Fill ``kernels.triton.sampling.Draws.fields`` [5, S] for these rows."""
    records = rows.records
    seeds, temperatures = records["seed"], records["temperature"]
    is_greedy = records["is_greedy"]
    out[0] = (seeds & _LOW_WORD).astype(np.uint32).view(np.int32)
    out[1] = (seeds >> _HIGH_SHIFT).astype(np.uint32).view(np.int32)
    out[2] = rows.positions
    out[3] = (1.0 / np.where(is_greedy, np.float32(1.0), temperatures)).astype(np.float32).view(np.int32)
    out[4] = is_greedy


class DeviceSampler:
    """Samples tokens below ``vocab_size``. The logits may be wider (``table.num_embeddings``)."""

    def __init__(self, vocab_size: int, table: RowTable, num_ranks: int) -> None:
        self._vocab_size = vocab_size
        counts = TokenCounts(table)
        self._processors = [counts if isinstance(processor, Penalties) else processor for processor in table.processors]
        self._device = table.last_tokens.device
        self._upload = table.upload
        self._kernels = SamplingKernels(
            max_rows=SAMPLED_ROWS,
            vocab_size=vocab_size,
            num_embeddings=table.num_embeddings,
            device=self._device,
            num_parts=num_ranks,
        )

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

    def _rules(self, rows: SampledRows, chosen: Ints64, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
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


def compile_kernels(
    *, vocab_size: int, num_embeddings: int, dtype: torch.dtype, device: torch.device, num_ranks: int
) -> None:
    """Compile all kernels that ``DeviceSampler`` and CUDA graphs may launch for logits of this dtype."""
    with compile_only():
        kernels = SamplingKernels(
            max_rows=1, vocab_size=vocab_size, num_embeddings=num_embeddings, device=device, num_parts=num_ranks
        )
        logits = torch.zeros(1, num_embeddings, dtype=dtype, device=device)
        kernels.run_all(logits)
        masks = torch.zeros(1, -(-num_embeddings // 32), dtype=torch.int32, device=device)
        rules = torch.zeros(1, 2, dtype=torch.int32, device=device)
        for scores in (logits, logits.float()):  # logits of a graph, and an fp32 copy
            mask(scores, rules, masks)


MORE_ROWS = 64
"""Rows by which the table grows. While it grows, it needs twice its memory."""


@dataclass(slots=True)
class _CountRow:
    """A row of the count table, its request, and the number of counted tokens."""

    index: int
    request: RequestRow
    num_counted: int


class TokenCounts:
    """The logits processor of penalties on a GPU: counts the tokens of requests.

    The host does not know the last token of a request in time. So a token is counted when the next token is sampled:
    then the table of last tokens contains it. In the count table, a request reuses the row of the previous request with
    its row index. N rows of the count table, W width of a row (all tokens that a prompt may have), X penalized rows.
    """

    def __init__(self, table: RowTable) -> None:
        device = table.last_tokens.device
        self._table = table
        self._width = table.num_embeddings
        self._counts = torch.zeros(0, self._width, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._rows: dict[int, _CountRow] = {}

    def wants(self, sampling: Sampling) -> bool:
        return sampling.has_penalties

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Penalize ``rows`` of logits [S, V] fp32."""
        count_rows = [self._count(row.request) for row in rows]
        indices = np.array([row.index for row in count_rows], dtype=np.int32)
        self._count_last(count_rows, [row.num_tokens for row in rows], indices)
        samplings = [row.request.sampling for row in rows]
        columns = PenalizedRows(
            upload(np.array([row.index for row in rows], dtype=np.int32)),
            upload(indices),
            upload(np.array([sampling.frequency_penalty for sampling in samplings], dtype=np.float32)),
            upload(np.array([sampling.presence_penalty for sampling in samplings], dtype=np.float32)),
            upload(np.array([sampling.repetition_penalty for sampling in samplings], dtype=np.float32)),
        )
        penalize(logits, self._counts, columns)

    def _count(self, request: RequestRow) -> _CountRow:
        """Return the request's count row. If it is new, count the tokens with which the request was opened."""
        row = self._rows.get(request.row_index)
        if row is not None and row.request is request:
            return row
        index = len(self._rows) if row is None else row.index
        if index == len(self._counts):
            self._counts = torch.cat([self._counts, self._counts.new_zeros(MORE_ROWS, self._width)])
        row = self._rows[request.row_index] = _CountRow(index, request, len(request.token_ids))
        counts = self._counts[index]
        counts.zero_()
        ids = np.array(request.token_ids, dtype=np.int64)
        counts.index_fill_(0, self._table.upload(ids[request.first_id : request.num_prompt]), IN_PROMPT)
        output = self._table.upload(ids[request.num_prompt :])
        counts.index_add_(0, output, self._one.expand(len(output)))
        return row

    def _count_last(self, rows: list[_CountRow], positions: list[int], indices: Ints32) -> None:
        """Count the tokens sampled in the previous step. positions [X]: of new tokens. indices [X]: of rows."""
        uncounted = [i for i, row in enumerate(rows) if positions[i] > row.num_counted]
        if not uncounted:
            return
        for i in uncounted:
            rows[i].num_counted += 1
        row_indices = np.array([rows[i].request.row_index for i in uncounted], dtype=np.int64)
        tokens = self._table.last_tokens.index_select(0, self._table.upload(row_indices))
        flat = self._table.upload(indices[uncounted].astype(np.int64) * self._width) + tokens
        self._counts.view(-1).index_add_(0, flat, self._one.expand(len(flat)))
