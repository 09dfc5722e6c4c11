"""Hidden states for the requests that asked for them, copied to the host behind the step.

The hidden state of an output token is that of the position before it, from whose logits it was drawn. With the first
output token come those of the prompt, where the request wants all, in blocks.

Shape letters: N positions, T tokens of the step, S rows that sample, D model size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aioengine.protocol.columns import HIDDEN_STATES, Extra, state_extras
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
    """``count`` consecutive positions of a request, up to ``end`` (exclusive)."""

    request: RequestRow
    end: int
    count: int


class PromptStates(NamedTuple):
    """The prompt positions whose hidden states a step gives. ``places``: [N] int64, their indices among its tokens."""

    runs: list[_Run]
    places: Ints


class StepHiddenStates:
    """The hidden states of a step, on their way to the host."""

    def __init__(self) -> None:
        self._prompts: tuple[list[_Run], Tensor] | None = None
        self._sampled: tuple[list[_Run], Tensor] | None = None

    def add_prompts(self, runs: list[_Run], hidden: Tensor) -> None:
        """hidden: [N, D] on the device, the positions of these runs in order; the next step may overwrite it."""
        self._prompts = runs, host_copy(hidden)

    def add_sampled(self, runs: list[_Run], hidden: Tensor) -> None:
        """As ``add_prompts``, of the positions before sampled tokens; hidden [N, D]."""
        self._sampled = runs, host_copy(hidden)

    def extras(self) -> list[Extra]:
        """The states of output tokens, once the step is done. Those of a prompt wait in its row for its first token."""
        for request, _, data in _data_of(self._prompts):
            if request.prompt_states is not None:
                request.prompt_states.append(data)
        found: list[Extra] = []
        for request, end, data in _data_of(self._sampled):
            if request.prompt_states is not None:  # the first token: its own state is the last of the prompt's
                states = b"".join(request.prompt_states)
                found += state_extras(request.uid, states[: -len(data)], len(data))
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
    """Collects the hidden states of a step; ``take`` returns them and begins the next step."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._step = StepHiddenStates()

    def take(self) -> StepHiddenStates:
        """The hidden states of the step."""
        step, self._step = self._step, StepHiddenStates()
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
        """hidden: [S, D] of the positions from whose logits the tokens of these rows were drawn."""
        chosen = [i for i, request in enumerate(rows.requests) if request.sampling.hidden_states]
        runs = [_Run(rows.requests[i], int(rows.positions[i]), 1) for i in chosen]
        if runs:
            self._step.add_sampled(runs, hidden[self._upload(np.array(chosen, dtype=np.int64))])
