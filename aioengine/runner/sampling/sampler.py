"""From logits to token ids: processors, temperature, softmax, top-k, top-p, min-p, the draw.

What a row gives is a function of its logits, its parameters, its seed and its position, bit for bit, whatever stands
beside it: every operation on a row is either exact or done in an order that depends on the width alone. Rows that use
no feature skip it; a batch of greedy rows is one pass over the logits.

Shape letters: S rows that sample, V vocabulary that may be sampled, W row width of the scratch memory: a place for
each id that a prompt may hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.runner.rows import logits_row
from aioengine.runner.sampling.philox import UniformTable
from aioengine.runner.sampling.truncation import BLOCK, Truncation, draw, draw_truncated
from aioengine.runner.transfer import upload_to

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.logits import LogitsProcessor, LogitsRow
    from aioengine.runner.rows import SampledRows

    Ints = npt.NDArray[np.int64]

FAILED = -1
"""The token id of a row whose logits are not numbers."""

_CHUNK_ROWS = 32  # rows that are worked on at once: bounds the scratch memory, and stays near the caches
_NUM_SEGMENTS = 32
_SEGMENTED_FROM = 1 << 15


class Sampler:
    """Draws tokens below ``vocab_size``; logits of ``num_embeddings`` may be wider, the rest is never drawn."""

    def __init__(
        self, *, vocab_size: int, num_embeddings: int, device: torch.device, processors: tuple[LogitsProcessor, ...]
    ) -> None:
        self._vocab_size = vocab_size
        self._width = -(-num_embeddings // BLOCK) * BLOCK
        self._processors = processors
        self._device = device
        self._upload = upload_to(device)
        self._uniform_table = UniformTable()
        self._scratch = torch.empty(0, self._width, device=device)

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """One token id for each row of the logits [S, >= V], as [S] int64 on their device; FAILED for a bad row."""
        logits = logits[:, : self._vocab_size]
        records = rows.records
        is_plain = records["is_plain"]
        if is_plain.all():
            return greedy(logits)
        token_ids = torch.empty(len(records), dtype=torch.int64, device=self._device)
        is_greedy, is_truncated = records["is_greedy"], records["is_truncated"]
        for mask, method in (
            (is_plain, self._plain),
            (is_greedy & ~is_plain, self._processed),
            (~is_greedy & ~is_truncated, self._drawn),
            (~is_greedy & is_truncated, self._truncated),
        ):
            for chunk in _chunks(np.flatnonzero(mask)):
                token_ids[self._upload(chunk)] = method(logits, rows, chunk)
        return token_ids

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [S, >= V] of these rows -> [S, V] fp32 after the processors, in the scratch memory."""
        return self._process(logits[:, : self._vocab_size], rows, np.arange(len(logits)))[:, : self._vocab_size]

    def _plain(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> Tensor:
        """Logits [S, V] -> token ids [X] of the ``chunk`` [X] of rows: the largest logits."""
        return greedy(logits[self._upload(chunk)])

    def _processed(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> Tensor:
        """As ``_plain``, [X], after the processors."""
        return greedy(self._process(logits, rows, chunk))

    def _drawn(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> Tensor:
        """Logits [S, V] -> token ids [X] of the ``chunk`` [X] of rows: drawn."""
        p_SW, is_bad_S = self._probabilities(logits, rows, chunk)
        return self._upload(draw(p_SW, self._uniforms(rows, chunk))).masked_fill_(is_bad_S, FAILED)

    def _truncated(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> Tensor:
        """As ``_drawn``, [X], from what top-k, top-p and min-p leave."""
        p_SW, is_bad_S = self._probabilities(logits, rows, chunk)
        rules = Truncation(*(rows.records[name][chunk] for name in ("top_k", "top_p", "min_p")))
        token_S = draw_truncated(p_SW, self._uniforms(rows, chunk), rules)
        return self._upload(token_S).masked_fill_(is_bad_S, FAILED)

    def _process(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> Tensor:
        """The logits of these rows after the processors, [S, W] fp32 in the scratch memory, -inf beyond V."""
        if len(self._scratch) < len(chunk):
            self._scratch = torch.empty(len(chunk), self._width, device=self._device)
        scores_SW = self._scratch[: len(chunk)]
        is_all = len(chunk) == len(logits)
        scores_SW[:, : self._vocab_size].copy_(logits if is_all else logits[self._upload(chunk)])
        scores_SW[:, self._vocab_size :] = -torch.inf
        bits = rows.records["processors"][chunk]
        for i, processor in enumerate(self._processors):
            users = np.flatnonzero(bits >> i & 1).tolist()
            if users:
                processor.apply(scores_SW, [_logits_row(rows, int(chunk[user]), user) for user in users], self._upload)
        return scores_SW

    def _probabilities(self, logits: Tensor, rows: SampledRows, chunk: Ints) -> tuple[Tensor, Tensor]:
        """[S, W] fp32 in the scratch memory, and which rows have none, [S] bool (their entries are replaced)."""
        p_SW = self._process(logits, rows, chunk)
        p_SW.div_(self._upload(rows.records["temperature"][chunk])[:, None])
        torch.softmax(p_SW, -1, out=p_SW)
        is_bad_S = p_SW[:, 0].isnan()  # one entry that is no number makes all entries of its row so
        if bool(is_bad_S.any()):
            p_SW[is_bad_S] = 1.0
        return p_SW, is_bad_S

    def _uniforms(self, rows: SampledRows, chunk: Ints) -> npt.NDArray[np.float64]:
        """[X] float64 of the ``chunk`` [X] of rows."""
        return self._uniform_table.take(rows.row_indices[chunk], rows.records["seed"][chunk], rows.positions[chunk])


def greedy(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row [S, V], as [S] int64; FAILED where the largest is no finite number.

    Over many numbers, maxima of segments first: torch's max with places is an order of magnitude slower than amax.
    """
    num_rows, width = logits.shape
    if num_rows * width < _SEGMENTED_FROM:
        largest, token_ids = logits.max(-1)
        return _where_finite(token_ids, largest)
    size = -(-width // _NUM_SEGMENTS)
    whole = width // size
    best = torch.unflatten(logits[:, : whole * size], -1, (whole, size)).amax(-1)
    if whole * size < width:
        best = torch.cat([best, logits[:, whole * size :].amax(-1, keepdim=True)], dim=-1)
    largest, segment = best.max(-1, keepdim=True)
    places = segment * size + torch.arange(size, device=logits.device)
    places.clamp_(max=width - 1)
    inside = logits.gather(-1, places).argmax(-1, keepdim=True)
    return _where_finite(places.gather(-1, inside)[:, 0], largest[:, 0])


def _where_finite(token_ids: Tensor, largest: Tensor) -> Tensor:
    """token_ids [S], FAILED where ``largest`` [S] is not finite: only a finite number less itself is zero."""
    return token_ids.where(largest - largest == 0, FAILED)


def _chunks(indices: Ints) -> list[Ints]:
    """indices [X] in pieces of up to _CHUNK_ROWS."""
    return [indices[i : i + _CHUNK_ROWS] for i in range(0, len(indices), _CHUNK_ROWS)]


def _logits_row(rows: SampledRows, row: int, index: int) -> LogitsRow:
    return logits_row(index, rows.requests[row], int(rows.positions[row]))
