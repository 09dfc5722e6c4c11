"""From the hidden states of a step to one vector for each text. T tokens, R rows, D model size, C size of a vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.families._config import Task
from aioengine.protocol.columns import NO_TOKEN, POOLED_VECTOR, Extra
from aioengine.runner.transfer import Readback
from aioengine.scheduler.plan import VECTOR

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.models._base import Model
    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RequestRow
    from aioengine.runner.transfer import Upload
    from aioengine.scheduler.plan import Plan

    Ints = npt.NDArray[np.int64]


MEAN = "mean"
"""``PoolingSettings.kind`` that needs the hidden states of all tokens."""


class PooledVectors:
    """The vectors of a step, on their way to the host."""

    def __init__(self, uids: list[int], vectors: Tensor) -> None:
        """vectors: [R, C] fp32 of these requests."""
        self._uids = uids
        self._vectors = Readback(vectors)

    def extras(self) -> list[Extra]:
        """Wait for the device; the vectors as they are sent: raw fp32."""
        vectors = self._vectors.array()
        return [
            Extra(uid, NO_TOKEN, POOLED_VECTOR, vector.tobytes())
            for uid, vector in zip(self._uids, vectors, strict=True)
        ]


class PooledRows:
    """The rows of a step that give a vector: ``places`` among all of them."""

    def __init__(self, pooler: Pooler, uids: list[int], places: list[int]) -> None:
        self._pooler = pooler
        self._uids = uids
        self._places = places
        self._vectors: Tensor | None = None

    def take(self, states: Tensor) -> None:
        """states [R, D] of all rows of the step."""
        self._vectors = self._pooler.vectors(states, self._places)

    def vectors(self) -> PooledVectors:
        assert self._vectors is not None, "the step was not computed"
        return PooledVectors(self._uids, self._vectors)


class Pooler:
    """Pools as ``PoolingSettings.kind`` says: the last token of a row, its first one ("cls"), or the mean of all."""

    def __init__(self, model: Model, kind: str, upload: Upload) -> None:
        self._model = model
        self._kind = kind
        self._upload = upload

    def rows(self, plan: Plan, requests: list[RequestRow]) -> PooledRows | None:
        """The rows of the computed ``requests`` that give a vector; None: no row does."""
        giving = {row.uid for row in plan.rows if row.outputs & VECTOR}
        places = [place for place, request in enumerate(requests) if request.uid in giving]
        return PooledRows(self, [requests[place].uid for place in places], places) if places else None

    def outputs(self, rows: StepRows) -> Ints | None:
        """[R] indices of the tokens whose hidden states are needed; None: those of all tokens."""
        if self._kind == MEAN:
            return None
        return rows.token_ends - (rows.counts if self._kind == "cls" else 1)

    def states(self, hidden: Tensor, rows: StepRows) -> Tensor:
        """Hidden states of ``outputs`` [R or more, D], or of all tokens [T, D] -> [R, D]."""
        if self._kind != MEAN:
            return hidden[: len(rows.counts)]
        lengths = self._upload(rows.counts)
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0, unsafe=True)

    def vectors(self, states: Tensor, places: list[int]) -> Tensor:
        """States [R, D] -> the vectors of the rows ``places``, [rows, C] fp32: states, or scores of a classifier."""
        if len(places) < len(states):
            states = states[self._upload(np.array(places))]
        if self._model.task is not Task.CLASSIFY:
            return states.float()
        return self._model.compute_logits(states.to(self._model.dtype)).float()
