"""Sample token ids from logits on a CPU: processors, temperature, softmax, top-k, top-p, min-p, random choice.

The token of a row depends only on its logits, parameters, seed and position. All operations on a row are exact, or
their order depends only on the width. Rows skip unused features; a batch of greedy rows needs one pass over the logits.

S rows that sample, X rows of a chunk, V vocabulary that may be sampled, W width of the scratch memory (all ids that a
prompt may have).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, from_numpy

from aioengine.kernels.arrays import Ints64
from aioengine.layers.ranks import RankGroup
from aioengine.runner.logits import apply_processors
from aioengine.runner.request_row import SampledRows
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.philox import UniformTable
from aioengine.runner.sampling.truncation import BLOCK, draw, draw_truncated

if TYPE_CHECKING:
    from aioengine.runner.sampling.device_sampler import DeviceSampler

FAILED = -1
"""The token id of a row with invalid logits."""

_CHUNK_ROWS = 32  # rows processed at once: limits the scratch memory, and fits the caches
_NUM_SEGMENTS = 32
_SEGMENTED_FROM = 1 << 15


class Sampler:
    """Samples tokens below ``vocab_size``. The logits may be wider (``table.num_embeddings``)."""

    def __init__(self, vocab_size: int, table: RowTable) -> None:
        self._vocab_size = vocab_size
        self._width = -(-table.num_embeddings // BLOCK) * BLOCK
        self._processors = table.processors
        self._uniform_table = UniformTable(len(table.sampling))
        self._scratch = torch.empty(0, self._width)

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Sample one token id per row of logits [S, >= V] -> [S] int64; FAILED for a bad row."""
        logits = logits[:, : self._vocab_size]
        records = rows.records
        is_plain_greedy = records["is_plain_greedy"]
        if is_plain_greedy.all():
            return greedy(logits)
        token_ids = torch.empty(len(records), dtype=torch.int64)
        is_greedy, is_truncated = records["is_greedy"], records["is_truncated"]
        for mask, method in (
            (is_plain_greedy, self._plain),
            (is_greedy & ~is_plain_greedy, self._processed),
            (~is_greedy & ~is_truncated, self._random),
            (~is_greedy & is_truncated, self._random),
        ):
            indices = np.flatnonzero(mask)
            for start in range(0, len(indices), _CHUNK_ROWS):
                chunk = indices[start : start + _CHUNK_ROWS]
                token_ids[from_numpy(chunk)] = method(logits, rows, chunk)
        return token_ids

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [S, >= V] of these rows -> [S, V] fp32 after the processors, in the scratch memory."""
        return self._process(logits[:, : self._vocab_size], rows, np.arange(len(logits)))[:, : self._vocab_size]

    def _plain(self, logits: Tensor, rows: SampledRows, chunk: Ints64) -> Tensor:
        """Logits [S, V] -> greedy token ids [X] of the rows ``chunk`` [X]."""
        return greedy(logits[from_numpy(chunk)])

    def _processed(self, logits: Tensor, rows: SampledRows, chunk: Ints64) -> Tensor:
        """Logits [S, V] -> greedy token ids [X] of the rows ``chunk`` [X] after the processors."""
        return greedy(self._process(logits, rows, chunk))

    def _random(self, logits: Tensor, rows: SampledRows, chunk: Ints64) -> Tensor:
        """Logits [S, V] -> token ids [X] of the rows ``chunk`` [X], all of them with truncation or all without."""
        p_XW = self._process(logits, rows, chunk)
        records = rows.records[chunk]
        p_XW.div_(from_numpy(rows.records["temperature"][chunk])[:, None])  # a column of ``records`` is not contiguous
        torch.softmax(p_XW, -1, out=p_XW)
        is_bad_X = p_XW[:, 0].isnan()  # one NaN makes all entries of its row NaN
        if bool(is_bad_X.any()):
            p_XW[is_bad_X] = 1.0
        uniform_X = self._uniform_table.take(rows.row_indices[chunk], records["seed"], rows.positions[chunk])
        token_X = draw_truncated(p_XW, uniform_X, records) if records["is_truncated"][0] else draw(p_XW, uniform_X)
        return from_numpy(token_X).masked_fill_(is_bad_X, FAILED)

    def _process(self, logits: Tensor, rows: SampledRows, chunk: Ints64) -> Tensor:
        """Logits [S, V] -> logits [X, W] fp32 of the rows ``chunk`` [X] after the processors, -inf from V to W.

        They are in the scratch memory.
        """
        if len(self._scratch) < len(chunk):
            self._scratch = torch.empty(len(chunk), self._width)
        scores_XW = self._scratch[: len(chunk)]
        is_all = len(chunk) == len(logits)
        scores_XW[:, : self._vocab_size].copy_(logits if is_all else logits[from_numpy(chunk)])
        scores_XW[:, self._vocab_size :] = -torch.inf
        apply_processors(self._processors, scores_XW, rows, chunk, from_numpy)
        return scores_XW


def greedy(logits: Tensor) -> Tensor:
    """Return the argmax [S] int64 of each row of logits [S, V], the first for ties; FAILED if the maximum is not
    finite.

    numpy's argmax is many times faster than torch's, but has no bf16. So for many numbers torch first computes maxima
    of segments, and only one segment of each row is converted.
    """
    num_rows, width = logits.shape
    size, starts = width, np.zeros(num_rows, dtype=np.int64)
    if num_rows * width >= _SEGMENTED_FROM:
        size = -(-width // _NUM_SEGMENTS)
        num_full = width // size
        best = torch.unflatten(logits[:, : num_full * size], -1, (num_full, size)).amax(-1)
        if num_full * size < width:
            best = torch.cat([best, logits[:, num_full * size :].amax(-1, keepdim=True)], dim=-1)
        starts = np.minimum(best.float().numpy().argmax(-1) * size, width - size)
        logits = logits.unfold(-1, size, 1)[torch.arange(num_rows), from_numpy(starts)]
    wide = logits.float().numpy()
    indices = wide.argmax(-1)
    is_finite = np.isfinite(wide[np.arange(num_rows), indices])
    return from_numpy(np.where(is_finite, starts + indices, FAILED))


class RankSampler:
    """The sampler of a rank: samples on rank 0, and gives the token ids to all ranks."""

    def __init__(self, sampler: Sampler | DeviceSampler, ranks: RankGroup) -> None:
        """sampler: of this rank. Only rank 0 uses it."""
        self._sampler = sampler
        self._ranks = ranks

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Sample one token id per row of logits [S, >= V] -> [S] int64; FAILED for a bad row."""
        if self._ranks.rank:
            token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        else:
            token_ids = self._sampler.sample(logits, rows).contiguous()
        return self._ranks.broadcast(token_ids)
