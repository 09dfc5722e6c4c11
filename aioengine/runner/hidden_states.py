"""Hidden states for the rows that asked for them: copied to the host behind the step, in the order of the tokens.

An output token gets the hidden state of the position before it, which gave it; the first one, where the request wants
all, those of the whole prompt.

Shape letters: N positions, T tokens of the step, S rows that sample, D model size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aioengine.protocol.columns import HIDDEN_STATES, Extra
from aioengine.runner.transfer import host_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RequestRow, SampledRows
    from aioengine.runner.transfer import Upload

    Ints = npt.NDArray[np.int64]


class _Run(NamedTuple):
    """Consecutive positions of a request behind which stands position ``end``."""

    request: RequestRow
    end: int
    count: int


class PromptStates(NamedTuple):
    """The positions of prompts whose hidden states a step gives. ``places``: [N] int64, their tokens of the step."""

    runs: list[_Run]
    places: Ints


class StepStates:
    """The hidden states of a step, on their way to the host."""

    def __init__(self) -> None:
        self._prompts: tuple[list[_Run], Tensor] | None = None
        self._sampled: tuple[list[_Run], Tensor] | None = None

    def add_prompts(self, runs: list[_Run], hidden: Tensor) -> None:
        """hidden: [N, D] on the device, of these runs; the next step may overwrite it."""
        self._prompts = runs, host_copy(hidden)

    def add_sampled(self, runs: list[_Run], hidden: Tensor) -> None:
        """As ``add_prompts``, of the positions before sampled tokens; hidden [N, D]."""
        self._sampled = runs, host_copy(hidden)

    def extras(self) -> list[Extra]:
        """Those of output tokens, once the step is done. Those of prompts are kept until their first token."""
        for request, _, data in _data_of(self._prompts):
            if request.prompt_states is not None:
                request.prompt_states.append(data)
        found: list[Extra] = []
        for request, end, own in _data_of(self._sampled):
            data = own
            if request.prompt_states is not None:  # which end with its own
                data = b"".join(request.prompt_states)
                request.prompt_states = None
            found.append(Extra(request.uid, end - request.num_prompt, HIDDEN_STATES, data))
        return found


def _data_of(part: tuple[list[_Run], Tensor] | None) -> Iterator[tuple[RequestRow, int, bytes]]:
    """The request, the end and the packed numbers of each run in hidden states [N, D]."""
    if part is not None:
        runs, hidden = part
        numbers, start = hidden.float().numpy(), 0
        for request, end, count in runs:
            yield request, end, numbers[start : start + count].tobytes()
            start += count


class HiddenStates:
    """Collects the hidden states of one step after the other; ``take`` gives those of the present one."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._step = StepStates()

    def take(self) -> StepStates:
        """What the step gives."""
        step, self._step = self._step, StepStates()
        return step

    def find_prompts(self, rows: StepRows) -> PromptStates | None:
        """The positions of prompts among these rows; None: there are none."""
        runs: list[_Run] = []
        places: list[Ints] = []
        for i, request in enumerate(rows.requests):
            start, count = int(rows.starts[i]), int(rows.counts[i])
            if request.prompt_states is not None and start < request.num_prompt:
                first = rows.token_ends[i] - count
                count = min(count, request.num_prompt - start)
                runs.append(_Run(request, start + count, count))
                places.append(np.arange(first, first + count))
        return PromptStates(runs, np.concatenate(places)) if runs else None

    def add_prompts(self, hidden: Tensor, found: PromptStates) -> None:
        """hidden: [N, D] of ``found.places``."""
        self._step.add_prompts(found.runs, hidden)

    def add_sampled(self, hidden: Tensor, rows: SampledRows) -> None:
        """hidden: [S, D] of the positions that gave the tokens of these rows."""
        chosen = [i for i, request in enumerate(rows.requests) if request.sampling.hidden_states]
        runs = [_Run(rows.requests[i], int(rows.positions[i]), 1) for i in chosen]
        if runs:
            self._step.add_sampled(runs, hidden[self._upload(np.array(chosen, dtype=np.int64))])
