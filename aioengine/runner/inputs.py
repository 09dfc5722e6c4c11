"""Build the tensors of a step from the rows of a plan, by operations on columns.

T packed tokens of the step, R rows, P pages of the longest row, G page groups, D model size, N extra output tokens,
X rows whose last token only the device has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.attention._base import ForwardBatch
from aioengine.kernels.arrays import Ints64
from aioengine.models._base import Model, ModelInputs
from aioengine.runner.images import Span
from aioengine.runner.request_row import RequestRow
from aioengine.runner.rows import RowTable
from aioengine.runner.state_pool import StatePool
from aioengine.runner.transfer import upload_together
from aioengine.scheduler.plan import TOKENS, NewRow, Row


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as columns of length R.

    Attributes:
        token_ends: end of each row among the packed tokens.
        samples: whether the row samples a token (``TOKENS`` in ``Row.outputs``).
        num_known: number of token ids of the row in the plan: its count, or one less if only the device has the last
            token.
        known_ids: the concatenated token ids of the plan.
    """

    requests: list[RequestRow]
    row_indices: Ints64
    starts: Ints64
    counts: Ints64
    token_ends: Ints64
    samples: npt.NDArray[np.bool_]
    num_known: Ints64
    known_ids: Ints64

    def unknown_tokens(self) -> tuple[Ints64, Ints64]:
        """Return the rows [X] whose last token only the device has, and the index [X] of this token in the step."""
        rows = np.flatnonzero(self.num_known < self.counts)
        return rows, self.token_ends[rows] - 1

    def shifted(self, positions: Ints64, short_length: int, row_of_token: Ints64 | slice) -> Ints64:
        """Return positions [T], with ``short_length`` added in rows of long requests; see ``InputSpec``."""
        if not short_length:
            return positions
        shifts = np.array([request.is_long * short_length for request in self.requests], dtype=np.int64)
        return positions + shifts[row_of_token]


def model_inputs(model: Model, token_ids: Tensor, positions: Tensor, **fields: Any) -> ModelInputs:
    """Return the inputs of this model for token ids [T] and positions [T], or [3, T] for a model with three axes.

    fields: further fields of ``ModelInputs``.
    """
    spec = model.input_spec
    if positions.dim() < min(spec.position_axes, 2):
        positions = positions.expand(spec.position_axes, -1)
    return ModelInputs(
        positions=positions,
        token_ids=None if spec.embeddings else token_ids,
        embeddings=model.embed(token_ids) if spec.embeddings else None,
        **fields,
    )


class InputBuilder:
    """Builds the tensors of a step. Token ids must be below ``num_embeddings``.

    Attributes:
        table: the open requests.
        states: the states of open requests; None for a model without states.
    """

    def __init__(
        self, table: RowTable, states: StatePool | None = None, *, page_size: int, num_embeddings: int
    ) -> None:
        self.table = table
        self.page_size = page_size
        self.states = states
        self._num_embeddings = num_embeddings

    def open(self, opened: NewRow) -> None:
        """Open a request in the table, and load its state from its snapshot.

        Raises:
            ValueError: see ``RowTable.open``.
        """
        self.table.open(opened)
        if opened.snapshot >= 0 and self.states is not None:
            self.states.restore(opened.snapshot, self.table.requests[opened.uid].row_index)

    def take_snapshots(self, snapshots: list[tuple[int, int]], rows: StepRows) -> None:
        """Copy states of rows after a step, as in ``StepPlan.snapshots``. Failed rows are not in ``rows``."""
        if not snapshots or self.states is None:
            return
        row_indices = {request.uid: request.row_index for request in rows.requests}
        for uid, snapshot_id in snapshots:
            if uid in row_indices:
                self.states.take_snapshot(row_indices[uid], snapshot_id)

    def columns_of(self, rows: list[Row]) -> StepRows:
        """Return the columns of these rows, whose requests must be open."""
        requests = [self.table.requests[row.uid] for row in rows]
        counts = np.array([row.count for row in rows], dtype=np.int64)
        num_known = [len(row.token_ids) for row in rows]
        return StepRows(
            requests,
            np.array([request.row_index for request in requests], dtype=np.int64),
            np.array([row.start for row in rows], dtype=np.int64),
            counts,
            counts.cumsum(),
            np.array([row.outputs == TOKENS for row in rows], dtype=np.bool_),
            np.array(num_known, dtype=np.int64),
            np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, sum(num_known)),
        )

    def find_wrong_ids(self, rows: StepRows) -> dict[int, str]:
        """Return uid -> error for rows with token ids outside the embedding table.

        Such an id would fail all later work on a GPU. The frontend does not check the ids from the tokenizer, which may
        not match the model.
        """
        # viewed as unsigned, negative ids are larger than all others
        is_wrong = rows.known_ids.view(np.uint64) >= self._num_embeddings
        if not is_wrong.any():
            return {}
        ends = rows.num_known.cumsum()
        errors: dict[int, str] = {}
        for i in np.flatnonzero(is_wrong).tolist():
            uid = rows.requests[int(np.searchsorted(ends, i, side="right"))].uid
            error = f"token id {rows.known_ids[i]} is outside the vocabulary of {self._num_embeddings}"
            errors.setdefault(uid, error)
        return errors

    def build(
        self,
        model: Model,
        rows: StepRows,
        row_outputs: Ints64 | None,
        *,
        num_outputs: int,
        extra_outputs: Ints64 | None = None,
        on_host: bool = False,
        token_ids: Tensor | None = None,
    ) -> tuple[ModelInputs, ForwardBatch]:
        """Build the inputs of the model and of attention for at least one valid row.

        Args:
            row_outputs: [R] index of the one token of each row whose hidden state the model returns; None: all tokens.
            num_outputs: at least R; ``row_outputs`` is padded to this length with the index 0. Not used if each row has
                one token and there are no ``extra_outputs``.
            extra_outputs: [N] indices of further tokens, returned after ``row_outputs``.
            on_host: the tensors stay on the host; all tokens of the rows must be known.
            token_ids: [T] on the device, instead of the tokens of the rows.
        """
        table, spec, page_size = self.table, model.input_spec, self.page_size
        upload = torch.from_numpy if on_host else table.upload
        num_rows, num_tokens = len(rows.requests), int(rows.token_ends[-1])
        kv_lengths = rows.starts + rows.counts
        # the row of each token, and its index in the request
        row_of_token, indices = np.arange(num_tokens), rows.starts
        if num_tokens > num_rows:
            row_of_token = np.repeat(np.arange(num_rows), rows.counts)
            indices = np.arange(num_tokens) + np.repeat(kv_lengths - rows.token_ends, rows.counts)
        outputs: Ints64 | None = None
        if row_outputs is not None and (extra_outputs is not None or num_tokens > num_rows):
            outputs = np.zeros(num_outputs, dtype=np.int64)
            outputs[:num_rows] = row_outputs
            if extra_outputs is not None:
                outputs = np.concatenate([outputs, extra_outputs])
        token_types = None
        if spec.token_types:
            second_starts = np.array([request.second_text for request in rows.requests])
            if second_starts.any():  # some row is a text pair
                second_starts[second_starts == 0] = np.iinfo(np.int64).max
                token_types = upload((indices >= second_starts[row_of_token]).astype(np.int64))
        images, spans = table.images, self._image_spans(rows)
        if images and spans:
            positions = images.positions(spans, indices)
        else:
            positions = rows.shifted(indices, spec.short_length, row_of_token)
        tables_GRP = table.page_tables.of_step(rows.row_indices, rows.starts, -(-int(kv_lengths.max()) // page_size))
        pages = indices // page_size
        # slot = page id * page size + offset, and offset = index - page * page size
        slots = [indices + (pages_RP[row_of_token, pages] - pages) * page_size for pages_RP in tables_GRP]
        columns = {"positions": positions, "slots": slots[0], "pages": tables_GRP[0]}
        if token_ids is None:
            columns |= _id_columns(rows)
        if outputs is not None:
            columns["outputs"] = outputs
        tensors = upload_together(upload, columns)
        inputs = model_inputs(
            model,
            self._token_ids(tensors) if token_ids is None else token_ids,
            tensors["positions"],
            rows=upload(row_of_token) if spec.rows else None,
            token_types=token_types,
            outputs=tensors.get("outputs"),
            adapters=table.adapters.of_step(rows.row_indices, row_of_token, outputs),
            states=self.states and self.states.of_step(rows.row_indices, rows.starts, rows.counts, upload),
            slots=None if model.features is None else tensors["slots"],
        )
        if table.num_with_embeds:
            inputs = self._with_embeds(model, rows, inputs)
        if images and spans:
            inputs = images.add_features(spans, inputs, upload)
        batch = ForwardBatch(
            slot_mapping=tensors["slots"],
            page_table=tensors["pages"],
            query_lengths=rows.counts.tolist(),
            kv_lengths=kv_lengths.tolist(),
            host_pages=tables_GRP[0],
        )
        if len(slots) > 1:
            groups = zip(upload(np.stack(slots)), upload(tables_GRP), tables_GRP, strict=True)
            parts = [
                replace(batch, slot_mapping=slot_mapping, page_table=page_table, host_pages=host_pages)
                for slot_mapping, page_table, host_pages in groups
            ]
            batch = replace(batch, parts=parts)
        if images and spans and model.attention_shape.has_bidirectional_images:
            batch = replace(batch, bidirectional_images=images.bidirectional(spans))
        return inputs, batch

    def _image_spans(self, rows: StepRows) -> list[Span]:
        """Return the ``Span`` of each row whose request has images."""
        images = self.table.images
        if images is None or not images.requests:
            return []
        starts, counts = rows.starts.tolist(), rows.counts.tolist()
        firsts = (rows.token_ends - rows.counts).tolist()
        return [
            Span(i, request.uid, request.row_index, starts[i], starts[i] + counts[i], firsts[i])
            for i, request in enumerate(rows.requests)
            if request.uid in images.requests
        ]

    def _with_embeds(self, model: Model, rows: StepRows, inputs: ModelInputs) -> ModelInputs:
        """If rows compute prompts given as embeddings, return inputs with embeddings [T, D] instead of token ids.

        Frees the embeddings after the last row of the prompt.
        """
        embeddings = inputs.embeddings
        for i, request in enumerate(rows.requests):
            if request.embeds is None:
                continue
            if embeddings is None:
                assert inputs.token_ids is not None, "neither token ids nor embeddings"
                embeddings = model.embed(inputs.token_ids)
            end, first = int(rows.starts[i] + rows.counts[i]), int(rows.token_ends[i] - rows.counts[i])
            part = request.embeds[int(rows.starts[i]) : end]
            embeddings[first : first + len(part)] = self.table.upload(part.copy())
            if end >= request.num_prompt:
                request.embeds = None
                self.table.num_with_embeds -= 1
        return inputs if embeddings is inputs.embeddings else replace(inputs, token_ids=None, embeddings=embeddings)

    def _token_ids(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the token ids [T] int64, from tensors as in ``_id_columns``."""
        if "unknown" not in tensors:
            return tensors["ids"]
        last_ids = self.table.last_tokens.index_select(0, tensors["unknown_rows"])
        if "ids" not in tensors:
            return last_ids
        tensors["ids"][tensors["unknown"]] = last_ids
        return tensors["ids"]


def _id_columns(rows: StepRows) -> dict[str, Ints64]:
    """Return the token ids [T] of the plan. If only the device has X of them, also return their indices and the row
    indices of their requests. If it has all of them, return no ids.
    """
    num_tokens, known_ids = int(rows.token_ends[-1]), rows.known_ids
    if len(known_ids) == num_tokens:
        return {"ids": known_ids}
    unknown_rows, unknown = rows.unknown_tokens()
    columns = {"unknown": unknown, "unknown_rows": rows.row_indices[unknown_rows]}
    if known_ids.size:
        columns["ids"] = np.zeros(num_tokens, dtype=np.int64)
        columns["ids"][np.delete(np.arange(num_tokens), unknown)] = known_ids
    return columns
