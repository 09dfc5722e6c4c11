"""Structured output: tokens that the grammar of a request does not allow next cannot be drawn.

The masks are computed on the host, while a GPU computes the step whose logits they are for.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow, RowConstraint
    from aioengine.runner.transfer import Upload


class GrammarMask:
    def __init__(self) -> None:
        self._begun: _Begun | None = None
        self._buffers: list[_Buffer] = []  # two on a GPU: one is written while the other is copied

    def wants(self, sampling: Sampling) -> bool:
        return sampling.grammar is not None

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Rule tokens out of rows of logits [S, W]. A row whose constraint is over is left as it is: it ends."""
        self.mask(logits, [row.index for row in rows], [row.constraint for row in rows])

    def mask(self, logits: Tensor, indices: Sequence[int], constraints: Sequence[RowConstraint | None]) -> None:
        """As ``apply``, for the rows ``indices`` of logits [S, W] and their constraints; None: it has none."""
        pairs = [(index, each) for index, each in zip(indices, constraints, strict=True) if each is not None]
        wanted = [constraint for _, constraint in pairs]
        begun = self._take_begun(wanted)
        if begun is None:
            begun = self._begin(wanted, is_on_gpu=logits.is_cuda, is_beside=False)
        if begun is None:
            return
        rules = [
            (pairs[place][0], token_id if token_id >= 0 else -1 - row)
            for place, constraint, token_id, row in begun.rows
            if not constraint.error
        ]
        if not rules:
            return
        if logits.is_cuda:
            self._buffers[0].apply(logits, rules, begun.masks)
            self._buffers.reverse()
        else:
            mask_on_cpu(logits, rules, begun.masks)

    def begin(self, constraints: Sequence[RowConstraint | None], *, is_on_gpu: bool) -> None:
        """Compute the masks that ``mask`` will be called for next, beside the caller. No constraint may advance until
        then.
        """
        self._take_begun([])
        wanted = [each for each in constraints if each is not None]
        self._begun = self._begin(wanted, is_on_gpu=is_on_gpu, is_beside=True)

    def _begin(self, constraints: list[RowConstraint], *, is_on_gpu: bool, is_beside: bool) -> _Begun | None:
        """Compute their masks, beside the caller or not; None: all are over, or there is none."""
        rows: list[_Row] = []
        computed: list[RowConstraint] = []
        for place, constraint in enumerate(constraints):
            if constraint.is_complete or constraint.error:
                continue
            token_id = constraint.next_token
            rows.append((place, constraint, token_id, len(computed)))
            if token_id < 0:
                computed.append(constraint)
        if not rows:
            return None
        source = rows[0][1].source
        masks = self._memory(len(rows), len(computed), source.num_words, is_on_gpu=is_on_gpu)
        wait: Callable[[], None] | None = None
        if computed and is_beside:
            wait = source.begin(computed, masks)
        elif computed:
            source.fill(computed, masks)
        return _Begun(constraints, rows, masks, wait)

    def _take_begun(self, constraints: list[RowConstraint]) -> _Begun | None:
        """What was begun, once it is computed; None where that is for others."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if begun.wait is not None:
            begun.wait()  # also of masks that are not needed any more: until then, constraints must not advance
        return begun if begun.constraints == constraints else None

    def _memory(self, num_rows: int, num_masks: int, num_words: int, *, is_on_gpu: bool) -> npt.NDArray[np.int32]:
        """An array [num_masks, num_words] for masks."""
        if is_on_gpu:
            self._buffers = self._buffers or [_Buffer(), _Buffer()]
            return self._buffers[0].array(num_rows, num_masks, num_words)
        return np.empty((num_masks, num_words), dtype=np.int32)


_Row = tuple[int, "RowConstraint", int, int]
"""Its place among all, its constraint, the only token that is allowed or -1, and then the index of its mask."""


class _Begun(NamedTuple):
    """Masks [N, words] that are being computed until ``wait`` returns, of N of the ``rows``, which are constrained."""

    constraints: list[RowConstraint]
    rows: list[_Row]
    masks: npt.NDArray[np.int32]
    wait: Callable[[], None] | None


class _Buffer:
    """Memory for masks and, behind them, the rules of ``kernels.triton.grammar_mask``: pinned, where they are computed,
    and on the GPU. A stream of its own copies them, while the GPU still computes the logits that they are for.
    """

    def __init__(self) -> None:
        self._memory = self._sent = torch.empty(0, dtype=torch.int32)
        self._stream = torch.cuda.Stream()
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def array(self, num_rows: int, num_masks: int, num_words: int) -> npt.NDArray[np.int32]:
        """An array [num_masks, num_words], with room for rules of ``num_rows``, once its last copy has left."""
        self._copied.synchronize()
        size = num_masks * num_words
        if len(self._memory) < size + 2 * num_rows:
            self._memory = torch.empty(num_rows * (num_words + 2), dtype=torch.int32, pin_memory=True)
        return self._memory[:size].numpy().reshape(num_masks, num_words)

    def apply(self, logits: Tensor, rules: list[tuple[int, int]], masks: npt.NDArray[np.int32]) -> None:
        """Rule tokens out of logits [S, W], by masks [N, words] of ``array``."""
        size = masks.size
        end = size + 2 * len(rules)
        self._memory[size:end].numpy()[:] = np.fromiter(chain.from_iterable(rules), np.int32, end - size)
        if len(self._sent) < end:
            self._sent = torch.empty_like(self._memory, device=logits.device)
            self._used.record()  # what is queued so far may use this memory
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            self._sent[:end].copy_(self._memory[:end], non_blocking=True)
            self._copied.record()
        torch.cuda.current_stream().wait_event(self._copied)
        kernel = import_module("aioengine.kernels.triton.grammar_mask")
        kernel.mask(logits, self._sent[size:end].view(-1, 2), self._sent[:size].view(masks.shape))
        self._used.record()


def mask_on_cpu(logits: Tensor, rules: list[tuple[int, int]], masks: npt.NDArray[np.int32]) -> None:
    """Rule tokens out of logits [S, W]; rules and masks [N, words]: as ``kernels.triton.grammar_mask``."""
    width = min(logits.shape[1], 32 * masks.shape[1])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=width, bitorder="little")
    is_banned = torch.from_numpy(bits ^ 1).view(torch.bool)
    for index, only in rules:
        row = logits[index, :width]
        if only < 0:
            row.masked_fill_(is_banned[-1 - only], -torch.inf)
        else:
            kept = row[only : only + 1].clone()
            row.fill_(-torch.inf)
            row[only : only + 1] = kept


PLUGIN = GrammarMask
