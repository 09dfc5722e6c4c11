"""Structured output: forbids the tokens that the grammar of a request does not allow next.

The host computes the masks while the GPU computes the logits. If a row has only one allowed token, it needs no mask.

S rows of logits, W width of logits, X constrained rows, N masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32
from aioengine.protocol.messages import Sampling
from aioengine.runner.request_row import LogitsRow, RowConstraint
from aioengine.runner.transfer import Upload


class GrammarMask:
    """The logits processor of grammars."""

    def __init__(self) -> None:
        self._started: _Masks | None = None
        self._buffers: list[_Buffer] = []  # two on a GPU: one is filled while the other is copied

    def wants(self, sampling: Sampling) -> bool:
        return sampling.grammar is not None

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Set the logits [S, W] of forbidden tokens to -inf. Rows whose constraint is over are unchanged: they end."""
        self.mask(logits, [row.index for row in rows], [row.request.constraint_at(row.num_tokens) for row in rows])

    def mask(self, logits: Tensor, indices: Sequence[int], constraints: Sequence[RowConstraint | None]) -> None:
        """Do the same as ``apply`` for the rows ``indices`` of logits [S, W], with these constraints (None: none)."""
        pairs = [(index, row) for index, row in zip(indices, constraints, strict=True) if row is not None]
        present = [constraint for _, constraint in pairs]
        masks = self._take_started(present)
        if masks is None:
            masks = self._compute(present, is_on_gpu=logits.is_cuda, in_background=False)
        if masks is None:
            return
        # An error may have been found while the mask was computed.
        rules = [(pairs[i][0], allowed) for i, constraint, allowed in masks.rows if not constraint.error]
        if not rules:
            return
        if logits.is_cuda:
            self._buffers[0].apply(logits, rules, masks.words)
            self._buffers.reverse()
        else:
            apply_masks(logits, torch.tensor(rules), torch.from_numpy(masks.words))

    def begin(self, constraints: Sequence[RowConstraint | None], *, is_on_gpu: bool) -> None:
        """Start to compute the masks for the next call of ``mask`` in the background. Until then, no constraint may
        advance.
        """
        self._take_started([])  # drops masks that were not used
        present = [constraint for constraint in constraints if constraint is not None]
        self._started = self._compute(present, is_on_gpu=is_on_gpu, in_background=True)

    def _compute(self, constraints: list[RowConstraint], *, is_on_gpu: bool, in_background: bool) -> _Masks | None:
        """Compute masks. None: all constraints are over, or there are none."""
        rows: list[_Row] = []
        computed: list[RowConstraint] = []
        for i, constraint in enumerate(constraints):
            if constraint.is_complete or constraint.error:
                continue
            allowed = constraint.next_token
            if allowed < 0:
                allowed = -1 - len(computed)
                computed.append(constraint)
            rows.append((i, constraint, allowed))
        if not rows:
            return None
        source = rows[0][1].source
        if is_on_gpu:
            self._buffers = self._buffers or [_Buffer(), _Buffer()]
            words = self._buffers[0].array(len(rows), len(computed), source.num_words)
        else:
            words = np.empty((len(computed), source.num_words), dtype=np.int32)
        wait: Callable[[], None] | None = None
        if computed and in_background:
            wait = source.begin(computed, words)
        elif computed:
            source.fill(computed, words)
        return _Masks(constraints, rows, words, wait)

    def _take_started(self, constraints: list[RowConstraint]) -> _Masks | None:
        """Wait for the started masks and return them; None: they are for other constraints, or none were started."""
        masks, self._started = self._started, None
        if masks is None:
            return None
        if masks.wait is not None:
            masks.wait()  # even if they are no longer needed: constraints must not advance before
        return masks if masks.constraints == constraints else None


_Row = tuple[int, "RowConstraint", int]
"""Index of the constraint, the constraint, and ``allowed``: its only allowed token, or -1 - the index of its mask."""


class _Masks(NamedTuple):
    """Masks ``words`` [N, words], complete when ``wait`` has returned. rows: the constraints that are not over; N of
    them have a mask.
    """

    constraints: list[RowConstraint]
    rows: list[_Row]
    words: Ints32
    wait: Callable[[], None] | None


class _Buffer:
    """Pinned memory and GPU memory for masks, followed by the rules of ``kernels.triton.logits``. They are copied
    on a separate stream, while the GPU still computes the logits.
    """

    def __init__(self) -> None:
        self._memory = self._copy = torch.empty(0, dtype=torch.int32)
        self._stream = torch.cuda.Stream()
        self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def array(self, num_rows: int, num_masks: int, num_words: int) -> Ints32:
        """Return an array [num_masks, num_words], followed by memory for ``num_rows`` rules. Wait for its last copy."""
        self._copied.synchronize()
        size = num_masks * num_words
        if len(self._memory) < size + 2 * num_rows:
            self._memory = torch.empty(num_rows * (num_words + 2), dtype=torch.int32, pin_memory=True)
        return self._memory[:size].numpy().reshape(num_masks, num_words)

    def apply(self, logits: Tensor, rules: list[tuple[int, int]], masks: Ints32) -> None:
        """Apply rules and masks [N, words], an array of ``array``, to logits [S, W]."""
        size = masks.size
        end = size + 2 * len(rules)
        self._memory[size:end].numpy()[:] = np.fromiter(chain.from_iterable(rules), np.int32, end - size)
        if len(self._copy) < end:
            self._copy = torch.empty_like(self._memory, device=logits.device)
            self._used.record()  # work that is queued already may still use the memory of the new tensor
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            self._copy[:end].copy_(self._memory[:end], non_blocking=True)
            self._copied.record()
        torch.cuda.current_stream().wait_event(self._copied)
        apply_masks(logits, self._copy[size:end].view(-1, 2), self._copy[:size].view(masks.shape))
        self._used.record()


def apply_masks(logits: Tensor, rules: Tensor, masks: Tensor) -> None:
    """Apply rules [X, 2] and masks [N, words] to logits [S, W], as in ``kernels.triton.logits``."""
    if logits.is_cuda:
        from aioengine.kernels.triton.logits import mask

        mask(logits, rules, masks)
        return
    width = min(logits.shape[1], 32 * masks.shape[1])
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=width, bitorder="little")
    is_banned = torch.from_numpy(bits ^ 1).view(torch.bool)
    for index, allowed in rules.tolist():
        row = logits[index, :width]
        if allowed < 0:
            row.masked_fill_(is_banned[-1 - allowed], -torch.inf)
        else:
            kept = row[allowed : allowed + 1].clone()
            row.fill_(-torch.inf)
            row[allowed : allowed + 1] = kept
