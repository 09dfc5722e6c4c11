"""Structured output: tokens that the grammar of a request does not allow next cannot be drawn.

The masks are computed on the host, while a GPU computes the step whose logits they are for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aioengine.runner.device_memory import SAMPLED_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.logits import Constraint, LogitsRow
    from aioengine.runner.transfer import Upload


class GrammarMask:
    """follow: called before masks are computed, as late as the device allows: constraints then follow the last tokens,
    for which the host waits.
    """

    def __init__(self) -> None:
        self.follow: Callable[[], None] | None = None
        self._begun: _Begun | None = None
        self._buffers = [_Buffer(), _Buffer()]

    def wants(self, sampling: Sampling) -> bool:
        return sampling.grammar is not None

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Rule tokens out of rows of logits [S, W]. A row whose constraint is over is left as it is: it ends."""
        self.mask(logits, [row.index for row in rows], [row.constraint for row in rows], upload)

    def mask(
        self, logits: Tensor, indices: Sequence[int], constraints: Sequence[Constraint | None], upload: Upload
    ) -> None:
        """As ``apply``, for the rows ``indices`` of logits [S, W] and their constraints."""
        if self.follow is not None:
            self.follow()
        live = [
            (index, constraint)
            for index, constraint in zip(indices, constraints, strict=True)
            if constraint is not None and not constraint.is_complete and not constraint.error
        ]
        if not live:
            return
        wanted = [constraint for _, constraint in live]
        masks = self._take_begun(wanted)
        if masks is None:
            masks = self._memory(wanted, is_on_gpu=logits.is_cuda)
            wanted[0].source.fill(wanted, masks)
        usable = [place for place, (_, constraint) in enumerate(live) if not constraint.error]
        places = np.array([live[place][0] for place in usable], dtype=np.int64)
        if len(usable) < len(live):
            masks[: len(usable)] = masks[usable]
        if not logits.is_cuda:
            mask_on_cpu(logits, places, masks)
        elif usable:
            kernel = import_module("aioengine.kernels.triton.grammar_mask")
            kernel.mask(logits, upload(places), self._buffers[0].send(len(usable), logits.device))
            self._buffers.reverse()

    def begin(self, constraints: Sequence[Constraint | None], *, is_on_gpu: bool) -> None:
        """Compute the masks that ``mask`` will be called for next, beside the caller. No constraint may advance until
        then.
        """
        self._take_begun([])
        wanted = [each for each in constraints if each is not None and not each.is_complete and not each.error]
        if wanted and len(wanted) <= SAMPLED_ROWS:
            masks = self._memory(wanted, is_on_gpu=is_on_gpu)
            self._begun = _Begun(wanted, masks, wanted[0].source.begin(wanted, masks))

    def _take_begun(self, wanted: list[Constraint]) -> npt.NDArray[np.int32] | None:
        """The masks [X, words] that were begun; None where those are not the wanted ones."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        begun.wait()
        return begun.masks if begun.constraints == wanted else None

    def _memory(self, constraints: list[Constraint], *, is_on_gpu: bool) -> npt.NDArray[np.int32]:
        """An array [X, words] for masks."""
        shape = len(constraints), constraints[0].source.num_words
        return self._buffers[0].array(shape) if is_on_gpu else np.empty(shape, dtype=np.int32)


class _Begun(NamedTuple):
    """Masks [X, words] that are being computed."""

    constraints: list[Constraint]
    masks: npt.NDArray[np.int32]
    wait: Callable[[], None]


class _Buffer:
    """Pinned memory for masks that a GPU reads: they are computed where they are copied from."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, 0, dtype=torch.int32)
        self._left: torch.cuda.Event | None = None

    def array(self, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
        """An array of the shape [X, words], once the copy of the last one has left."""
        if self._left is not None:
            self._left.synchronize()
        if len(self._memory) < shape[0] or self._memory.shape[1] != shape[1]:
            self._memory = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        return self._memory[: shape[0]].numpy()

    def send(self, num_rows: int, device: torch.device) -> Tensor:
        """The first ``num_rows`` [X, words] on the device."""
        sent = self._memory[:num_rows].to(device, non_blocking=True)
        self._left = self._left or torch.cuda.Event()
        self._left.record()
        return sent


def mask_on_cpu(logits: Tensor, indices: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
    """Set logits [S, W] of rows ``indices`` [X] to -inf where masks [X, words] have no bit."""
    width = min(logits.shape[1], 32 * masks.shape[1])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=width, bitorder="little")
    is_banned = torch.from_numpy(bits ^ 1).view(torch.bool)
    for row, index in enumerate(indices.tolist()):
        logits[index, :width].masked_fill_(is_banned[row], -torch.inf)


PLUGIN = GrammarMask
