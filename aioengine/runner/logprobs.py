"""Logprobs for the rows that ask for them: computed on the device, copied to the host after the step.

The logprobs of a position depend only on its logits and its request. Ties among the most likely tokens go to the lower
id. The logits of prompts are computed in pieces, so the memory does not grow with the prompt.

N positions, V vocabulary, K most likely tokens, M requested tokens, W = 2 + 2 K + M numbers per position
(``protocol.packed_logprobs``), T tokens of the step, S rows that sample, D model size, X rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, repeat
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.kernels.token_logprobs import measure
from aioengine.protocol.columns import NO_TOKEN, Extra, block_extras
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, OUTPUT_LOGPROBS, PROMPT_LOGPROBS
from aioengine.runner.inputs import StepRows
from aioengine.runner.request_row import RequestRow, RowLogprobs, SampledRows
from aioengine.runner.sampling.sampler import Sampler
from aioengine.runner.transfer import Upload, host_copy
from aioengine.settings.memory_model import SAMPLED_ROWS

if TYPE_CHECKING:
    from aioengine.runner.sampling.device_sampler import DeviceSampler


CPU_ROWS = 32
"""Positions computed at once on a CPU."""

PROMPT_ROWS = 2 * SAMPLED_ROWS
"""Prompt positions computed at once on a GPU. Their 16-bit logits need as much memory as the fp32 logits of
``SAMPLED_ROWS`` sampled rows.
"""

MAX_NUMBERS, MANY_VALUES_ROWS = 1 << 22, 16
"""Maximum numbers and positions computed at once for requests with many logprobs per position (size class above 0)."""


class Run(NamedTuple):
    """``count`` consecutive positions of a request. Their logits are computed at the previous positions."""

    row: RowLogprobs
    first: int
    count: int


class PromptRuns(NamedTuple):
    """The prompt positions that get logprobs in a step.

    token_indices: [N] int64, the tokens of the step whose logits are used. ended: requests whose prompts end in this
    step.
    """

    runs: list[Run]
    token_indices: Ints64
    ended: list[RowLogprobs]


class _Columns(NamedTuple):
    """Which logprobs are computed for N positions: for each position as many as the largest request needs.

    Attributes:
        num_top: number of most likely tokens. num_requested: number of requested tokens (``token_ids_logprob``).
        requested: [N, num_requested] int64 on the device; None: there are none.
    """

    num_top: int
    num_requested: int
    requested: Tensor | None


class _RowGroup(NamedTuple):
    """Sampled rows whose logprobs are computed together.

    Attributes:
        chosen: [X] their indices among the sampled rows of a step. indices: the same for tensors on the device.
    """

    rows: list[RowLogprobs]
    chosen: Ints64
    indices: Tensor | slice
    columns: _Columns


class _Results(NamedTuple):
    """Results while they are copied to the host. numbers: [N, W], the concatenated positions of ``runs``."""

    runs: Iterable[tuple[RowLogprobs, int, int]]
    numbers: Tensor
    columns: _Columns


class StepLogprobs:
    """The logprobs of one step, while they are copied to the host. ended: requests whose prompts end with this step."""

    def __init__(self) -> None:
        self.results: list[_Results] = []
        self.ended: list[RowLogprobs] = []

    def extras(self) -> tuple[list[Extra], set[int]]:
        """Return the logprobs as extras, and the uids of requests with a NaN logprob (because of NaN logits). Call it
        when the device has computed the step. Prompt logprobs are kept until the last step of the prompt.
        """
        extras: list[Extra] = []
        invalid: set[int] = set()
        for runs, tensor, columns in self.results:
            numbers = tensor.numpy()
            is_invalid = np.isnan(numbers[:, 0].view(np.float32))
            has_invalid = bool(is_invalid.any())
            data_of_all, row_bytes = numbers.tobytes(), numbers.strides[0]
            computed = columns.num_top, columns.num_requested
            start = 0
            for row, first, count in runs:
                end = start + count
                if has_invalid and is_invalid[start:end].any():
                    invalid.add(row.uid)
                needed = row.rules.num_top, len(row.rules.token_ids)
                if needed == computed:
                    data = data_of_all[start * row_bytes : end * row_bytes]
                else:
                    data = numbers[start:end, _column_indices(needed, computed)].tobytes()
                start = end
                index = first - row.num_prompt
                if index < 0:
                    prompt_bytes = -index * row.rules.position_bytes
                    row.parts.append(data[:prompt_bytes])
                    data = data[prompt_bytes:]
                if row.returns_next and data:
                    extras.append(Extra(row.uid, NO_TOKEN, NEXT_LOGPROBS, data))
                elif data:
                    extras.append(Extra(row.uid, index, OUTPUT_LOGPROBS, data))
        for row in self.ended:
            if row.parts:
                extras += block_extras(row.uid, PROMPT_LOGPROBS, b"".join(row.parts), row.rules.position_bytes)
                row.parts.clear()
        return extras, invalid


def _column_indices(needed: tuple[int, int], computed: tuple[int, int]) -> Ints64:
    """Return the columns [W] of a request with counts ``needed`` (num_top, num_requested) in ``computed`` columns."""
    num_top, num_requested = needed
    first_requested = 1 + computed[0]
    first_id = first_requested + computed[1]
    requested = slice(first_requested, first_requested + num_requested)
    return np.r_[0 : 1 + num_top, requested, first_id : first_id + 1 + num_top]


class Logprobs:
    """Computes the logprobs of steps. ``take`` returns the logprobs of the current step."""

    def __init__(
        self, compute_logits: Callable[[Tensor], Tensor], upload: Upload, sampler: Sampler | DeviceSampler | None
    ) -> None:
        """compute_logits: [N, D] -> [N, V]. sampler: applies logits processors; None for logprobs of the model's own
        distribution.
        """
        self._compute_logits = compute_logits
        self._upload = upload
        self._sampler = sampler
        self._step = StepLogprobs()
        self._requests: list[RequestRow] = []
        self._groups: list[_RowGroup] = []  # of these requests

    def take(self) -> StepLogprobs:
        """Return the logprobs of the step, and start the next step without any."""
        step, self._step = self._step, StepLogprobs()
        return step

    def find_prompts(self, rows: StepRows) -> PromptRuns | None:
        """Return the prompt positions of these rows that get logprobs; None: there are none."""
        runs: list[Run] = []
        ended: list[RowLogprobs] = []
        token_indices = [np.zeros(0, dtype=np.int64)]
        for i, row in _with_logprobs(rows.requests):
            start, count = int(rows.starts[i]), int(rows.counts[i])
            if start >= row.num_prompt or (row.rules.start < 0 and not row.returns_next):
                continue
            first = row.num_prompt if row.rules.start < 0 else max(start, row.rules.start - 1, 0) + 1
            last = min(start + count, row.num_prompt - (not row.returns_next))
            if last >= first:
                runs.append(Run(row, first, last + 1 - first))
                token_indices.append(rows.token_ends[i] - count - start + np.arange(first - 1, last))
            if start + count >= row.num_prompt:
                ended.append(row)
        return PromptRuns(runs, np.concatenate(token_indices), ended) if runs or ended else None

    def add_prompts(self, hidden: Tensor, prompts: PromptRuns) -> None:
        """Compute logprobs from hidden [N, D] of ``prompts.token_indices``."""
        done = 0
        for runs in _pieces(prompts.runs, CPU_ROWS if hidden.device.type == "cpu" else PROMPT_ROWS):
            # the tokens at these positions; 0 after the end of a prompt
            parts = [row.prompt[first : first + count] for row, first, count in runs]
            parts = [np.pad(part, (0, run.count - len(part))) for part, run in zip(parts, runs, strict=True)]
            token_ids = np.concatenate(parts)
            logits = self._compute_logits(hidden[done : done + len(token_ids)])
            done += len(token_ids)
            self._measure(logits, self._upload(token_ids), self._columns(runs), runs)
        self._step.ended += prompts.ended

    def add_sampled(self, logits: Tensor, rows: SampledRows, token_ids: Tensor, order: Tensor | None = None) -> None:
        """Compute the logprobs of sampled tokens.

        Args:
            logits: [S, V] of the rows, as returned by the model.
            rows: their requests.
            token_ids: [S] int64, negative for a bad row.
            order: [S] int64, the index of each row in ``logits``; None: they are in order.
        """
        if len(rows.requests) != len(self._requests) or not all(map(is_, rows.requests, self._requests)):
            self._requests = rows.requests
            max_rows = CPU_ROWS if logits.device.type == "cpu" else SAMPLED_ROWS
            self._groups = list(self._grouped(rows.requests, max_rows))
        for group in self._groups:
            scores = logits[group.indices if order is None else order[group.indices]]
            if self._sampler is not None:  # after processors and temperature, before truncation
                part = rows.part(group.chosen)
                is_greedy, temperatures = part.records["is_greedy"], part.records["temperature"]
                temperatures = np.where(is_greedy, np.float32(1.0), temperatures).astype(np.float32)
                scores = self._sampler.process(scores, part) / self._upload(temperatures)[:, None]
            runs = zip(group.rows, rows.positions[group.chosen].tolist(), repeat(1), strict=False)
            self._measure(scores, token_ids[group.indices].clamp(min=0), group.columns, runs)

    def _grouped(self, requests: list[RequestRow], max_rows: int) -> Iterator[_RowGroup]:
        """Group the requests [S] with logprobs for computation. Each of them samples one token."""
        with_logprobs = _with_logprobs(requests)
        done = 0
        for runs in _pieces([Run(row, 0, 1) for _, row in with_logprobs], max_rows):
            chosen = np.array([i for i, _ in with_logprobs[done : done + len(runs)]], dtype=np.int64)
            done += len(runs)
            start, end = int(chosen[0]), int(chosen[-1]) + 1
            is_range = np.array_equal(chosen, np.arange(start, end))
            indices = slice(start, end) if is_range else self._upload(chosen)
            yield _RowGroup([run.row for run in runs], chosen, indices, self._columns(runs))

    def _columns(self, runs: list[Run]) -> _Columns:
        """Return the logprobs to compute for the positions of these runs."""
        num_top = max(run.row.rules.num_top for run in runs)
        num_requested = max(len(run.row.rules.token_ids) for run in runs)
        if not num_requested:
            return _Columns(num_top, 0, None)
        table = np.zeros((len(runs), num_requested), dtype=np.int64)
        for ids, run in zip(table, runs, strict=True):
            ids[: len(run.row.rules.token_ids)] = run.row.rules.token_ids
        requested = self._upload(np.repeat(table, [run.count for run in runs], axis=0))
        return _Columns(num_top, num_requested, requested)

    def _measure(
        self, logits: Tensor, token_ids: Tensor, columns: _Columns, runs: Iterable[tuple[RowLogprobs, int, int]]
    ) -> None:
        """Compute logprobs from logits [N, V] and token_ids [N] of the concatenated positions of these runs."""
        numbers = host_copy(measure(logits, token_ids, columns.num_top, columns.requested))
        self._step.results.append(_Results(runs, numbers, columns))


def _with_logprobs(requests: list[RequestRow]) -> list[tuple[int, RowLogprobs]]:
    """Return the requests with logprobs and their indices, sorted by size class."""
    with_logprobs = [(i, row) for i, request in enumerate(requests) if (row := request.logprobs) is not None]
    return sorted(with_logprobs, key=lambda pair: pair[1].size_class)


def _pieces(runs: list[Run], max_rows: int) -> Iterator[list[Run]]:
    """Split the runs, in order, into pieces of one size class with up to ``max_rows`` positions."""
    for size_class, group in groupby(runs, key=lambda run: run.row.size_class):
        limit = min(max_rows, max(1, MAX_NUMBERS >> size_class), MANY_VALUES_ROWS) if size_class else max_rows
        piece, left = list[Run](), limit
        for full_run in group:
            run = full_run
            while run.count > left:
                if left:
                    piece.append(run._replace(count=left))
                yield piece
                run = run._replace(first=run.first + left, count=run.count - left)
                piece, left = [], limit
            piece.append(run)
            left -= run.count
        yield piece
