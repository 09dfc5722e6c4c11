"""The memory that CUDA graphs of steps with prompts read: a step is padded to their number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import ForwardBatch


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Of up to T tokens in up to R rows: what ``ForwardBatch`` calls so, [T] and last_tokens [R]; int64 on the device.

    Graphs of fewer tokens and rows read the beginnings.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last_tokens: Tensor

    @classmethod
    def zeros(cls, num_tokens: int, num_rows: int, device: torch.device) -> PaddedInputs:
        input_ids, positions, slot_mapping = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(input_ids, positions, slot_mapping, last_tokens)

    def first(self, num_tokens: int, num_rows: int) -> PaddedInputs:
        """The part that a graph of so many reads."""
        return PaddedInputs(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.last_tokens[:num_rows],
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Write a step that is no larger. The tokens behind it are of no row: theirs is a slot of the padding page, and
        whatever ids and positions were there before.
        """
        num_tokens, num_rows = len(batch.input_ids), len(batch.query_lengths)
        self.input_ids[:num_tokens].copy_(batch.input_ids)
        self.positions[:num_tokens].copy_(batch.positions)
        self.slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        self.slot_mapping[num_tokens:].zero_()
        self.last_tokens[:num_rows].copy_(batch.last_tokens)
        self.last_tokens[num_rows:].zero_()  # a larger step may have left places that this graph does not have
