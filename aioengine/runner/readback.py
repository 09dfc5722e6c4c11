"""From the device to the host, later: the copy is queued behind a step and waited for when the step is collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Readback:
    """Some numbers on their way to the host. On the CPU they are there already.

    source: where they come from, on the device; the next step may write others there.
    """

    __slots__ = ("_arrived", "_values", "source")

    def __init__(self, values: Tensor) -> None:
        self.source = values
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[int]:
        """The numbers [S], as soon as the device has computed them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[int] = self._values.tolist()
        return values
