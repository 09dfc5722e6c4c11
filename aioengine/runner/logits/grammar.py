"""Structured output: tokens that the grammar of a request does not allow next cannot be drawn.

The masks are computed on the host, while a GPU computes the step whose logits they are for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import LogitsRow
    from aioengine.runner.transfer import Upload

_ROWS_AT_ONCE = 128
"""Masks that are computed and uploaded together: of 200,000 tokens they have 3.2 MB."""


class GrammarMask:
    def wants(self, sampling: Sampling) -> bool:
        return sampling.grammar is not None

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Rule tokens out of rows of logits [S, W]. A row whose constraint is over is left as it is: it ends."""
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            live = [
                (row.index, row.constraint)
                for row in rows[start : start + _ROWS_AT_ONCE]
                if row.constraint is not None and not row.constraint.is_over
            ]
            if not live:
                continue
            source = live[0][1].source
            masks = np.empty((len(live), source.num_words), dtype=np.int32)
            source.fill([constraint for _, constraint in live], masks)
            usable = [place for place, (_, constraint) in enumerate(live) if not constraint.error]
            indices = np.array([live[place][0] for place in usable], dtype=np.int64)
            masks = masks[usable] if len(usable) < len(live) else masks
            if not logits.is_cuda:
                _mask(logits, indices, masks)
            elif usable:
                kernel = import_module("aioengine.kernels.triton.grammar_mask")
                kernel.mask(logits, upload(indices), upload(masks))


def _mask(logits: Tensor, indices: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
    """Set logits [S, W] of rows ``indices`` [X] to -inf where masks [X, words] have no bit: on the CPU."""
    width = min(logits.shape[1], 32 * masks.shape[1])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=width, bitorder="little")
    is_banned = torch.from_numpy(bits ^ 1).view(torch.bool)
    for row, index in enumerate(indices.tolist()):
        logits[index, :width].masked_fill_(is_banned[row], -torch.inf)


PLUGIN = GrammarMask
