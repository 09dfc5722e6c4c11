"""Where the weights of a model are, of which type, and how they are multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
