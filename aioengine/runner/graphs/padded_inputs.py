"""The input memory of CUDA graphs of steps with prompts. A step is padded to the token count of its graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from aioengine.models._base import Model, ModelInputs
from aioengine.runner.lora.grouping import FixedAdapters, FixedTiles, StepAdapters, TileRows
from aioengine.runner.state_pool import StatePool, states_for_graph

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import ForwardBatch


class PaddedAdapters:
    """The adapter tiles of steps with up to T tokens in up to R rows, in memory with fixed addresses."""

    def __init__(self, num_tokens: int, num_rows: int, group: TileRows, device: torch.device) -> None:
        self._tokens = FixedTiles(num_tokens, group, device)
        self._outputs = FixedTiles(num_rows, group, device)

    def for_graph(self, num_tokens: int, num_rows: int) -> FixedAdapters:
        """Return the tiles that a graph of ``num_tokens`` tokens and ``num_rows`` rows reads."""
        return FixedAdapters(self._tokens.for_graph(num_tokens), self._outputs.for_graph(num_rows))

    def fill(self, rows: StepAdapters, *, graph_tokens: int, graph_rows: int) -> None:
        """Write a step for a graph of this size. Padding tokens and rows use the base model."""
        assert rows.output_slots is not None
        self._tokens.fill(rows.token_slots, graph_tokens)
        self._outputs.fill(rows.output_slots[:graph_rows], graph_rows)


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """Inputs of up to T tokens in up to R rows, in memory with fixed addresses.

    Attributes:
        inputs: ``outputs`` [R] is the last token of each row.
        slots: [G, T] int64, ``ForwardBatch.slot_mapping`` of each of G page groups.
        adapters: memory of ``inputs.adapters``, for graphs of steps with adapters.
        states: the pool of ``inputs.states``; None for a model without states.
    """

    inputs: ModelInputs
    slots: Tensor
    adapters: PaddedAdapters | None = None
    states: StatePool | None = None

    @classmethod
    def zeros(
        cls, model: Model, num_tokens: int, num_rows: int, device: torch.device, *, states: StatePool | None = None
    ) -> PaddedInputs:
        """Return memory for up to ``num_tokens`` T tokens in up to ``num_rows`` R rows, filled with zeros."""
        spec, num_groups = model.input_spec, max(1, len(model.attention_shape.page_windows))

        def int_zeros(*size: int) -> Tensor:
            """[*size] int64 zeros."""
            return torch.zeros(size, dtype=torch.int64, device=device)

        embeddings = None
        if spec.embeddings:
            embeddings = torch.zeros(num_tokens, model.hidden_size, dtype=model.dtype, device=device)
        inputs = ModelInputs(
            positions=int_zeros(num_tokens) if spec.position_axes == 1 else int_zeros(spec.position_axes, num_tokens),
            token_ids=None if spec.embeddings else int_zeros(num_tokens),
            embeddings=embeddings,
            rows=int_zeros(num_tokens) if spec.rows else None,
            outputs=int_zeros(num_rows),
            states=None if states is None else states.padded(num_tokens, num_rows),
        )
        return cls(inputs, int_zeros(num_groups, num_tokens), states=states)

    def for_graph(self, num_tokens: int, num_rows: int) -> PaddedInputs:
        """Return views for a graph of ``num_tokens`` tokens and ``num_rows`` rows."""
        inputs = self.inputs
        assert inputs.outputs is not None
        part = ModelInputs(
            positions=inputs.positions[..., :num_tokens],
            token_ids=None if inputs.token_ids is None else inputs.token_ids[:num_tokens],
            embeddings=None if inputs.embeddings is None else inputs.embeddings[:num_tokens],
            rows=None if inputs.rows is None else inputs.rows[:num_tokens],
            outputs=inputs.outputs[:num_rows],
            states=None if inputs.states is None else states_for_graph(inputs.states, num_tokens, num_rows),
        )
        return PaddedInputs(part, self.slots[:, :num_tokens], states=self.states)

    def with_adapters(self, adapters: PaddedAdapters) -> PaddedInputs:
        """Return the same inputs for a graph of steps with adapters."""
        assert self.inputs.outputs is not None
        fixed = adapters.for_graph(self.slots.shape[1], len(self.inputs.outputs))
        return PaddedInputs(replace(self.inputs, adapters=fixed), self.slots, adapters, self.states)

    def fill(self, inputs: ModelInputs, batch: ForwardBatch) -> None:
        """Write a step that fits.

        Padding tokens belong to no row: their slots are on the padding page; their ids, embeddings, positions and rows
        are left over from earlier steps.
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
        for slots, part in zip(self.slots, batch.parts or (batch,), strict=True):
            slots[:num_tokens].copy_(part.slot_mapping)
        if num_tokens < self.slots.shape[1]:
            self.slots[:, num_tokens:].zero_()
        assert into.outputs is not None
        assert inputs.outputs is not None
        into.outputs[:num_rows].copy_(inputs.outputs[:num_rows])
        into.outputs[num_rows:].zero_()  # leftover indices of a larger step may be out of range
        if self.states is not None:
            assert into.states is not None
            assert inputs.states is not None
            self.states.fill(into.states.rows, inputs.states.rows)
        if self.adapters is not None:
            assert isinstance(inputs.adapters, StepAdapters)
            self.adapters.fill(inputs.adapters, graph_tokens=self.slots.shape[1], graph_rows=len(into.outputs))
