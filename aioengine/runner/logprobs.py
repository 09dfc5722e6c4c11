"""Logprobs of the tokens of a step, for the rows that asked for them: computed on the device, copied behind the step.

What a position gives is a function of its logits and of its own request: ties among the likeliest tokens go to the
lower id, whatever stands beside it. The logits of prompts are computed for some positions at a time, so the memory does
not grow with the prompt.

Shape letters: N positions, V vocabulary, K likeliest tokens, M tokens asked for, W = 2 + 2 K + M numbers of a position
(``protocol.packed_logprobs``), T tokens of the step, S rows that sample, D model size, X rows of a group.
"""

from __future__ import annotations

from itertools import groupby, repeat
from operator import is_
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from aioengine.kernels.token_logprobs import measure
from aioengine.protocol.columns import NO_TOKEN, Extra
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, OUTPUT_LOGPROBS, prompt_extras
from aioengine.runner.device_memory import SAMPLED_ROWS
from aioengine.runner.transfer import host_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RequestRow, SampledRows
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int64]

CPU_ROWS = 32
"""Positions computed at a time on a CPU."""

PROMPT_ROWS = 2 * SAMPLED_ROWS
"""Prompt positions computed at a time on a GPU. Their 16-bit logits take as much memory as the fp32 logits of
``SAMPLED_ROWS`` sampled rows.
"""

MAX_NUMBERS, MANY_VALUES_ROWS = 1 << 22, 16
"""For requests with many logprobs a position (size class above 0): bounds on the numbers, and on the positions, that
are computed at a time.
"""


class Run(NamedTuple):
    """Consecutive positions of a request, from ``first`` on. Their logits are those of the positions before them."""

    request: RequestRow
    first: int
    count: int


class PromptRuns(NamedTuple):
    """The positions of prompts that get logprobs in a step.

    places: [N] int64, the tokens of the step whose logits give them. ended: requests whose prompts end in this step.
    """

    runs: list[Run]
    places: Ints
    ended: list[RequestRow]


class _Wanted(NamedTuple):
    """What is computed for N positions, all alike: for each the maximum that any of them wants.

    Attributes:
        num_top: likeliest tokens. num_asked: tokens whose ids were given (``token_ids_logprob``).
        asked: [N, num_asked] int64 on the device, their ids; None: no position has any.
    """

    num_top: int
    num_asked: int
    asked: Tensor | None


class _Group(NamedTuple):
    """Sampled rows whose logprobs are computed together.

    Attributes:
        chosen: [X] their indices among the sampled rows of a step. places: the same for tensors on the device.
    """

    requests: list[RequestRow]
    chosen: Ints
    places: Tensor | slice
    wanted: _Wanted


class _Part(NamedTuple):
    """A block of results on its way to the host. ``numbers``: [N, W], the positions of ``runs`` one after the other."""

    runs: Iterable[tuple[RequestRow, int, int]]
    numbers: Tensor
    wanted: _Wanted


class StepLogprobs:
    """The logprobs of one step, on their way to the host."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._ended: list[RequestRow] = []

    def add(self, part: _Part) -> None:
        self._parts.append(part)

    def end(self, requests: list[RequestRow]) -> None:
        """The prompts of these requests end with this step."""
        self._ended += requests

    def extras(self) -> tuple[list[Extra], set[int]]:
        """The logprobs as messages, once the device is done, and the uids of requests that have a logprob of NaN, as a
        NaN among the logits makes it. Those of a prompt wait in its row for its last step.
        """
        found: list[Extra] = []
        invalid: set[int] = set()
        for part in self._parts:
            invalid |= _read(part, found)
        for request in self._ended:
            if request.logprobs is not None and request.logprobs.parts:
                found += prompt_extras(request.uid, b"".join(request.logprobs.parts), request.logprobs.rules)
                request.logprobs.parts.clear()
        return found, invalid


def _read(part: _Part, found: list[Extra]) -> set[int]:
    """Append the extras of output tokens to ``found``, and the numbers of prompts to their rows.

    Returns the uids of requests that have a position whose logprob is NaN.
    """
    numbers = part.numbers.numpy()
    is_invalid = np.isnan(numbers[:, 0].view(np.float32))
    has_invalid, invalid = bool(is_invalid.any()), set[int]()
    whole, row_bytes = numbers.tobytes(), numbers.strides[0]
    most = part.wanted.num_top, part.wanted.num_asked
    start = 0
    for request, first, count in part.runs:
        own = request.logprobs
        if own is None:
            raise ValueError(f"request {request.uid} asked for no logprobs")
        end = start + count
        if has_invalid and is_invalid[start:end].any():
            invalid.add(request.uid)
        shape = own.rules.num_top, len(own.rules.token_ids)
        if shape == most:
            data = whole[start * row_bytes : end * row_bytes]
        else:
            data = numbers[start:end, _columns(*shape, most)].tobytes()
        start = end
        index = first - request.num_prompt
        if index < 0:
            in_prompt = -index * own.rules.position_bytes
            own.parts.append(data[:in_prompt])
            data = data[in_prompt:]
        if own.gives_next and data:
            found.append(Extra(request.uid, NO_TOKEN, NEXT_LOGPROBS, data))
        elif data:
            found.append(Extra(request.uid, index, OUTPUT_LOGPROBS, data))
    return invalid


def _columns(num_top: int, num_asked: int, most: tuple[int, int]) -> Ints:
    """[W] the columns that a request with these counts takes from rows computed for ``most`` (num_top, num_asked)."""
    most_top, most_asked = most
    first_asked = 1 + most_top
    first_id = first_asked + most_asked
    return np.r_[0 : 1 + num_top, first_asked : first_asked + num_asked, first_id : first_id + 1 + num_top]


class Processes(Protocol):
    """The logits processors of a sampler."""

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [S, >= V] of these rows -> [S, V] after the processors; valid until the next call."""
        ...


class Logprobs:
    """Computes the logprobs of one step after the other; ``take`` gives those of the present one."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], upload: Upload, processes: Processes | None) -> None:
        """compute_logits: [N, D] -> [N, V]. processes: None for logprobs of the model's own distribution."""
        self._compute_logits = compute_logits
        self._upload = upload
        self._processes = processes
        self._step: StepLogprobs | None = None
        self._requests: list[RequestRow] = []
        self._groups: list[_Group] = []  # of these requests

    def take(self) -> StepLogprobs | None:
        """What the step gives; None: nothing."""
        step, self._step = self._step, None
        return step

    def find_prompts(self, rows: StepRows) -> PromptRuns | None:
        """The positions of the prompts of these rows that get logprobs; None: there are none."""
        runs: list[Run] = []
        ended: list[RequestRow] = []
        places = [np.zeros(0, dtype=np.int64)]
        for i in _asking(rows.requests):
            request = rows.requests[i]
            own, start, count = request.logprobs, int(rows.starts[i]), int(rows.counts[i])
            if own is None or start >= request.num_prompt or (own.rules.start < 0 and not own.gives_next):
                continue
            first = request.num_prompt if own.rules.start < 0 else max(start, own.rules.start - 1, 0) + 1
            last = min(start + count, request.num_prompt - (not own.gives_next))
            if last >= first:
                runs.append(Run(request, first, last + 1 - first))
                places.append(rows.token_ends[i] - count - start + np.arange(first - 1, last))
            if start + count >= request.num_prompt:
                ended.append(request)
        return PromptRuns(runs, np.concatenate(places), ended) if runs or ended else None

    def add_prompts(self, hidden: Tensor, found: PromptRuns) -> None:
        """hidden: [N, D] of ``found.places``."""
        done = 0
        for runs in _pieces(found.runs, CPU_ROWS if hidden.device.type == "cpu" else PROMPT_ROWS):
            token_ids = np.concatenate([_targets(run) for run in runs])
            logits = self._compute_logits(hidden[done : done + len(token_ids)])
            done += len(token_ids)
            self._measure(logits, self._upload(token_ids), self._wanted(runs), runs)
        self._present.end(found.ended)

    def add_sampled(self, logits: Tensor, rows: SampledRows, token_ids: Tensor, order: Tensor | None = None) -> None:
        """The logprobs of sampled tokens.

        Args:
            logits: [S, V] of the rows, as the model made them.
            rows: their requests.
            token_ids: [S] int64, negative for a bad row.
            order: [S] int64, the place of each row in ``logits``; None: its own.
        """
        if len(rows.requests) != len(self._requests) or not all(map(is_, rows.requests, self._requests)):
            self._requests = rows.requests
            max_rows = CPU_ROWS if logits.device.type == "cpu" else SAMPLED_ROWS
            self._groups = list(self._grouped(rows.requests, max_rows))
        for group in self._groups:
            scores = logits[group.places if order is None else order[group.places]]
            if self._processes is not None:
                scores = self._processed(scores, rows.part(group.chosen))
            runs = zip(group.requests, rows.positions[group.chosen].tolist(), repeat(1), strict=False)
            self._measure(scores, token_ids[group.places].clamp(min=0), group.wanted, runs)

    @property
    def _present(self) -> StepLogprobs:
        if self._step is None:
            self._step = StepLogprobs()
        return self._step

    def _processed(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [N, V] -> [N, V] fp32 after processors and temperature (greedy rows: 1), before truncation."""
        assert self._processes is not None
        records = rows.records
        temperatures = np.where(records["is_greedy"], np.float32(1.0), records["temperature"]).astype(np.float32)
        return self._processes.process(logits, rows) / self._upload(temperatures)[:, None]

    def _grouped(self, requests: list[RequestRow], max_rows: int) -> Iterator[_Group]:
        """The requests [S] that want logprobs, in groups to compute together, where each of them samples one token."""
        asking = _asking(requests)
        done = 0
        for runs in _pieces([Run(requests[i], 0, 1) for i in asking], max_rows):
            chosen = np.array(asking[done : done + len(runs)], dtype=np.int64)
            done += len(runs)
            start, end = int(chosen[0]), int(chosen[-1]) + 1
            is_range = np.array_equal(chosen, np.arange(start, end))
            places = slice(start, end) if is_range else self._upload(chosen)
            yield _Group([run.request for run in runs], chosen, places, self._wanted(runs))

    def _wanted(self, runs: list[Run]) -> _Wanted:
        """What the positions of these runs get."""
        rules = [run.request.logprobs.rules for run in runs if run.request.logprobs is not None]
        num_top = max(each.num_top for each in rules)
        num_asked = max(len(each.token_ids) for each in rules)
        if not num_asked:
            return _Wanted(num_top, 0, None)
        table = np.zeros((len(runs), num_asked), dtype=np.int64)
        for row, each in zip(table, rules, strict=True):
            row[: len(each.token_ids)] = each.token_ids
        return _Wanted(num_top, num_asked, self._upload(np.repeat(table, [run.count for run in runs], axis=0)))

    def _measure(
        self, logits: Tensor, token_ids: Tensor, wanted: _Wanted, runs: Iterable[tuple[RequestRow, int, int]]
    ) -> None:
        """logits [N, V] and tokens [N] of the positions of these runs, one after the other."""
        numbers = host_copy(measure(logits, token_ids, wanted.num_top, wanted.asked))
        self._present.add(_Part(runs, numbers, wanted))


def _asking(requests: list[RequestRow]) -> list[int]:
    """The indices of the requests that want logprobs, sorted by size class: one class is computed together."""
    asking = [i for i, request in enumerate(requests) if request.logprobs is not None]
    return sorted(asking, key=lambda i: _class_of(requests[i]))


def _targets(run: Run) -> Ints:
    """[count] the tokens at the positions of a run of a prompt; 0 behind its end."""
    own = run.request.logprobs
    assert own is not None
    known = own.prompt[run.first : run.first + run.count]
    return np.pad(known, (0, run.count - len(known)))


def _class_of(request: RequestRow) -> int:
    """Requests of one class are computed together."""
    return 0 if request.logprobs is None else request.logprobs.size_class


def _pieces(runs: list[Run], max_rows: int) -> Iterator[list[Run]]:
    """The runs in order, split into pieces of up to ``max_rows`` positions that are computed together."""
    for kind, group in groupby(runs, key=lambda run: _class_of(run.request)):
        room = most = min(max_rows, max(1, MAX_NUMBERS >> kind), MANY_VALUES_ROWS) if kind else max_rows
        piece: list[Run] = []
        for whole in group:
            run = whole
            while run.count > room:
                if room:
                    piece.append(run._replace(count=room))
                yield piece
                run = run._replace(first=run.first + room, count=run.count - room)
                piece, room = [], most
            piece.append(run)
            room -= run.count
        yield piece
