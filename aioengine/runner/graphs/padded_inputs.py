"""The input memory of CUDA graphs of steps with prompts, to whose number of tokens a step is padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.models._base import ModelInputs

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import ForwardBatch
    from aioengine.models._base import Model


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs of up to T tokens in up to R rows, in memory that never moves.

    Attributes:
        inputs: with ``outputs`` [R], the last token of each row.
        slot_mapping: [T] int64, as in ``ForwardBatch``.
    """

    inputs: ModelInputs
    slot_mapping: Tensor

    @classmethod
    def zeros(cls, model: Model, num_tokens: int, num_rows: int, device: torch.device) -> PaddedInputs:
        spec = model.input_spec

        def zeros(*size: int) -> Tensor:
            """[*size] int64 zeros."""
            return torch.zeros(size, dtype=torch.int64, device=device)

        embeddings = None
        if spec.embeddings:
            embeddings = torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=device)
        inputs = ModelInputs(
            positions=zeros(num_tokens) if spec.position_axes == 1 else zeros(spec.position_axes, num_tokens),
            token_ids=None if spec.embeddings else zeros(num_tokens),
            embeddings=embeddings,
            rows=zeros(num_tokens) if spec.rows else None,
            outputs=zeros(num_rows),
        )
        return cls(inputs, zeros(num_tokens))

    def first(self, num_tokens: int, num_rows: int) -> PaddedInputs:
        """The part that a graph of ``num_tokens`` tokens and ``num_rows`` rows reads: views."""
        inputs = self.inputs
        assert inputs.outputs is not None
        part = ModelInputs(
            positions=inputs.positions[..., :num_tokens],
            token_ids=None if inputs.token_ids is None else inputs.token_ids[:num_tokens],
            embeddings=None if inputs.embeddings is None else inputs.embeddings[:num_tokens],
            rows=None if inputs.rows is None else inputs.rows[:num_tokens],
            outputs=inputs.outputs[:num_rows],
        )
        return PaddedInputs(part, self.slot_mapping[:num_tokens])

    def fill(self, inputs: ModelInputs, batch: ForwardBatch) -> None:
        """Write a step that is no larger.

        The tokens after it belong to no row: their slot is in the padding page, and their ids, embeddings, positions
        and rows are those of earlier steps.
        """
        num_tokens, num_rows = len(batch.slot_mapping), len(batch.query_lengths)
        into = self.inputs
        into.positions[..., :num_tokens].copy_(inputs.positions)
        for target, source in (
            (into.token_ids, inputs.token_ids),
            (into.embeddings, inputs.embeddings),
            (into.rows, inputs.rows),
        ):
            if target is not None and source is not None:
                target[:num_tokens].copy_(source)
        self.slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        self.slot_mapping[num_tokens:].zero_()
        assert into.outputs is not None
        assert inputs.outputs is not None
        into.outputs[:num_rows].copy_(inputs.outputs[:num_rows])
        into.outputs[num_rows:].zero_()  # indices of a larger step may be out of range here
