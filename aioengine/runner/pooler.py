"""Pool hidden states to one vector per text. T tokens, R rows, D model size, C vector size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioengine.families._config import Task
from aioengine.kernels.arrays import Ints64
from aioengine.models._base import Model
from aioengine.protocol.columns import NO_TOKEN, POOLED_VECTOR, Extra
from aioengine.runner.inputs import StepRows
from aioengine.runner.request_row import RequestRow
from aioengine.runner.transfer import Readback, Upload
from aioengine.scheduler.plan import VECTOR, StepPlan

MEAN = "mean"
"""The ``PoolingSettings.kind`` that needs the hidden states of all tokens."""


class PooledRows(NamedTuple):
    """The rows of a step with a pooled vector.

    Attributes:
        indices: their indices among all rows. vectors: [rows, C] fp32, while they are copied to the host.
    """

    uids: list[int]
    indices: list[int]
    vectors: Readback

    def extras(self) -> list[Extra]:
        """Wait for the device, and return the vectors as raw fp32."""
        pairs = zip(self.uids, self.vectors.array(), strict=True)
        return [Extra(uid, NO_TOKEN, POOLED_VECTOR, vector.tobytes()) for uid, vector in pairs]


class Pooler:
    """Pools by ``PoolingSettings.kind``: the last token of a row, the first token ("cls"), or the mean of all."""

    def __init__(self, model: Model, kind: str, upload: Upload) -> None:
        self._model = model
        self._kind = kind
        self._upload = upload

    def rows(self, plan: StepPlan, requests: list[RequestRow]) -> PooledRows | None:
        """Return the rows of the computed ``requests`` with a vector; None: there are none."""
        uids = {row.uid for row in plan.rows if row.outputs == VECTOR}
        indices = [index for index, request in enumerate(requests) if request.uid in uids]
        return PooledRows([requests[index].uid for index in indices], indices, Readback(None)) if indices else None

    def outputs(self, rows: StepRows) -> Ints64 | None:
        """Return indices [R] of the tokens whose hidden states are needed; None: all tokens."""
        if self._kind == MEAN:
            return None
        return rows.token_ends - (rows.counts if self._kind == "cls" else 1)

    def states(self, hidden: Tensor, rows: StepRows) -> Tensor:
        """Hidden states of ``outputs`` [R or more, D], or of all tokens [T, D] -> [R, D]."""
        if self._kind != MEAN:
            return hidden[: len(rows.counts)]
        lengths = self._upload(rows.counts)
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0, unsafe=True)

    def pool(self, states: Tensor, rows: PooledRows) -> None:
        """Compute the vectors of ``rows`` from states [R, D] of all rows: hidden states, or scores of a classifier."""
        if len(rows.indices) < len(states):
            states = states[self._upload(np.array(rows.indices))]
        if self._model.task is Task.CLASSIFY:
            states = self._model.compute_logits(states.to(self._model.dtype))
        rows.vectors.start(states.float())
