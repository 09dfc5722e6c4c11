"""Logprobs of the tokens of a step, for the rows that asked for them: computed on the device, copied behind the step.

What a position gives is a function of its logits and of its own request: ties among the likeliest tokens go to the
lower id, whatever stands beside it. The logits of prompts are computed for some positions at a time, so the memory does
not grow with the prompt.

Shape letters: N positions, V vocabulary, K likeliest tokens, M tokens asked for, W = 2 + 2 K + M numbers of a position
(``protocol.packed_logprobs``), T tokens of the step, S rows that sample, D model size, C candidates.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from aioengine.protocol.columns import NO_TOKEN, Extra
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS, OUTPUT_LOGPROBS, PROMPT_LOGPROBS
from aioengine.runner.device_memory import SAMPLED_ROWS
from aioengine.runner.transfer import host_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RequestRow, SampledRows
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int64]

SEGMENT = 128
"""Logits whose maximum stands for them in the search for the likeliest tokens."""

CPU_ROWS = 32
"""Positions that are worked on at once on a CPU; ``SAMPLED_ROWS`` on a GPU."""

MAX_NUMBERS, MANY_VALUES_ROWS = 1 << 22, 16
"""For requests of another class than 0: about how many numbers are worked on at once, of how many positions at most."""

_LOW_WORD = (1 << 32) - 1
_LEAST_KEY = -(1 << 63)


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


def likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids [N, K] of the ``count`` largest logits of each row [N, V], best first; the lower id of equal ones.

    Over few of many logits the largest of each segment come first: they say which segments hold the result.
    """
    num_rows, width = logits.shape
    places = torch.arange(width, device=logits.device)
    if 4 * count * SEGMENT > width:
        return _ranked(logits, places.expand(num_rows, width), count)
    whole = width // SEGMENT
    best = logits[:, : whole * SEGMENT].unflatten(-1, (whole, SEGMENT)).amax(-1)
    if whole * SEGMENT < width:
        best = torch.cat([best, logits[:, whole * SEGMENT :].amax(-1, keepdim=True)], dim=-1)
    segments = _ranked(best, places[: best.shape[1]].expand(best.shape), count)
    candidates = (segments[:, :, None] * SEGMENT + places[:SEGMENT]).flatten(1)
    values = logits.gather(-1, candidates.clamp(max=width - 1)).float()
    return _ranked(values.masked_fill(candidates >= width, -torch.inf), candidates, count)


def _ranked(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Of ids [N, C] those of the ``count`` largest values [N, C], as [N, count]: by one key of value and id."""
    bits = (values.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it is equal to
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the values
    keys = order.to(torch.int64) * (1 << 32) + (_LOW_WORD - ids)
    return _LOW_WORD - (keys.topk(count, dim=-1).values & _LOW_WORD)


def measure(logits: Tensor, token_ids: Tensor, num_top: int, asked: Tensor | None) -> Tensor:
    """The numbers of each position, in the order of ``protocol.packed_logprobs``.

    Args:
        logits: [N, V].
        token_ids: [N] int64, the token of each position.
        num_top: how many of the likeliest tokens.
        asked: [N, M] int64, further tokens.

    Returns:
        [N, W] int32; the logprobs are the bits of fp32.
    """
    ids = token_ids[:, None]
    if num_top:
        ids = torch.cat([ids, likeliest(logits, num_top)], dim=-1)
    wanted = ids if asked is None else torch.cat([ids, asked], dim=-1)
    values = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, wanted)
    return torch.cat([values.view(torch.int32), ids.to(torch.int32)], dim=-1)


class _Part(NamedTuple):
    """The numbers [N, W] of some runs on the host, made for the largest ``num_top`` and ``num_asked`` of them."""

    runs: list[Run]
    numbers: Tensor
    num_top: int
    num_asked: int


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

    def extras(self) -> list[Extra]:
        """All of them, once the device is done: what a prompt gives comes with its last step, and waits in its row."""
        found: list[Extra] = []
        for part in self._parts:
            _read(part, found)
        for request in self._ended:
            if request.logprobs is not None and request.logprobs.parts:
                found.append(Extra(request.uid, NO_TOKEN, PROMPT_LOGPROBS, b"".join(request.logprobs.parts)))
                request.logprobs.parts.clear()
        return found


def _read(part: _Part, found: list[Extra]) -> None:
    """Append the extras of output tokens to ``found``, and the numbers of prompts to their rows."""
    numbers = part.numbers.numpy()
    whole, row_bytes = numbers.tobytes(), numbers.strides[0]
    most = part.num_top, part.num_asked
    start = 0
    for request, first, count in part.runs:
        own = request.logprobs
        if own is None:
            raise ValueError(f"request {request.uid} asked for no logprobs")
        end = start + count
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


def _columns(num_top: int, num_asked: int, most: tuple[int, int]) -> Ints:
    """[W] columns of a row with fewer tokens than ``most``, of those of the largest row."""
    most_top, most_asked = most
    first_asked = 1 + most_top
    first_id = first_asked + most_asked
    return np.r_[0 : 1 + num_top, first_asked : first_asked + num_asked, first_id : first_id + 1 + num_top]


class Processes(Protocol):
    """The logits processors of a sampler."""

    def process(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [S, >= V] of these rows -> [S, V] fp32 after the processors; valid until the next call."""
        ...


class Logprobs:
    """Computes the logprobs of one step after the other; ``take`` gives those of the present one."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], upload: Upload, processes: Processes | None) -> None:
        """compute_logits: [N, D] -> [N, V]. processes: None for logprobs of the model's own distribution."""
        self._compute_logits = compute_logits
        self._upload = upload
        self._processes = processes
        self._step: StepLogprobs | None = None

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
        for runs in _pieces(found.runs, self._max_rows(hidden)):
            count = sum(run.count for run in runs)
            logits = self._compute_logits(hidden[done : done + count])
            self._measure(logits, self._upload(np.concatenate([_targets(run) for run in runs])), runs)
            done += count
        self._present.end(found.ended)

    def add_sampled(self, logits: Tensor, rows: SampledRows, token_ids: Tensor, order: Tensor | None = None) -> None:
        """The logprobs of sampled tokens.

        Args:
            logits: [S, V] of the rows, as the model made them.
            rows: their requests.
            token_ids: [S] int64, negative for a bad row.
            order: [S] int64, the place of each row in ``logits``; None: its own.
        """
        asking = _asking(rows.requests)
        runs = [Run(rows.requests[i], int(rows.positions[i]), 1) for i in asking]
        done = 0
        for part in _pieces(runs, self._max_rows(logits)):
            chosen = np.array(asking[done : done + len(part)], dtype=np.int64)
            done += len(part)
            is_all = np.array_equal(chosen, np.arange(len(rows.requests)))
            places = slice(len(chosen)) if is_all else self._upload(chosen)
            of_logits = places if order is None else order[places]
            scores = logits[of_logits]
            if self._processes is not None:
                scores = self._processed(scores, rows.part(chosen))
            self._measure(scores, token_ids[places].clamp(min=0), part)

    @property
    def _present(self) -> StepLogprobs:
        if self._step is None:
            self._step = StepLogprobs()
        return self._step

    def _max_rows(self, tensor: Tensor) -> int:
        """Positions at once for a tensor [...] on the device."""
        return CPU_ROWS if tensor.device.type == "cpu" else SAMPLED_ROWS

    def _processed(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """Logits [N, V] -> [N, V] fp32 as they are drawn from, but for truncation; greedy rows at temperature 1."""
        assert self._processes is not None
        records = rows.records
        temperatures = np.where(records["is_greedy"], np.float32(1.0), records["temperature"]).astype(np.float32)
        return self._processes.process(logits, rows) / self._upload(temperatures)[:, None]

    def _measure(self, logits: Tensor, token_ids: Tensor, runs: list[Run]) -> None:
        """logits [N, V] and tokens [N] of the positions of these runs, one after the other."""
        rules = [run.request.logprobs.rules for run in runs if run.request.logprobs is not None]
        num_top = max(each.num_top for each in rules)
        num_asked = max(len(each.token_ids) for each in rules)
        asked = None
        if num_asked:
            table = np.zeros((len(runs), num_asked), dtype=np.int64)
            for row, each in zip(table, rules, strict=True):
                row[: len(each.token_ids)] = each.token_ids
            asked = self._upload(np.repeat(table, [run.count for run in runs], axis=0))
        numbers = host_copy(measure(logits, token_ids, num_top, asked))
        self._present.add(_Part(runs, numbers, num_top, num_asked))


def _asking(requests: list[RequestRow]) -> list[int]:
    """The places of the requests that want logprobs, those together that are computed together."""
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
    """Runs that are computed together, of up to ``max_rows`` positions, in order; long ones are cut."""
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
