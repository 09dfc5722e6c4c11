"""Hidden states for requests that ask for them, copied to the host after the step.

The hidden state of an output token is the state of the previous position: the token is sampled from its logits. If a
request asks for all hidden states, the states of the prompt are returned with the first output token, in blocks.

N positions, T tokens of the step, S rows that sample, D model size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.protocol.columns import HIDDEN_STATES, PROMPT_STATES, Extra, block_extras
from aioengine.runner.inputs import StepRows
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.transfer import Upload, host_copy


class _StateRun(NamedTuple):
    """``count`` consecutive positions of a request, up to ``end`` (exclusive)."""

    request: RequestRow
    end: int
    count: int


class PromptStates(NamedTuple):
    """The prompt positions whose hidden states a step returns. token_indices: [N] int64, indices among its tokens."""

    runs: list[_StateRun]
    token_indices: Ints64


_States = tuple[list[_StateRun], Tensor]
"""Runs, and the hidden states [N, D] of their positions."""


@dataclass(slots=True)
class StepHiddenStates:
    """The hidden states of a step, while they are copied to the host.

    Attributes:
        prompts: of positions of prompts. sampled: of positions before sampled tokens, in the order of sampling.
    """

    prompts: list[_States] = field(default_factory=list[_States])
    sampled: list[_States] = field(default_factory=list[_States])

    def extras(self) -> list[Extra]:
        """Return the hidden states as extras. Call it when the device has computed the step.

        Prompt states are kept until the first output token.
        """
        for request, _, data in _data_of(self.prompts):
            if request.prompt_states is not None:
                request.prompt_states.append(data)
        extras: list[Extra] = []
        for request, end, data in _data_of(self.sampled):
            if request.prompt_states is not None:  # the first token: its state is the last of the prompt
                states = b"".join(request.prompt_states)
                extras += block_extras(request.uid, PROMPT_STATES, states[: -len(data)], len(data))
                request.prompt_states = None
            extras.append(Extra(request.uid, end - request.num_prompt, HIDDEN_STATES, data))
        return extras


def _data_of(parts: list[_States]) -> Iterator[tuple[RequestRow, int, bytes]]:
    """Yield request, end and packed states of each run."""
    for runs, hidden in parts:
        states, start = hidden.float().numpy(), 0
        for request, end, count in runs:
            yield request, end, states[start : start + count].tobytes()
            start += count


class HiddenStates:
    """Collects the hidden states of a step."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._step = StepHiddenStates()

    def take(self) -> StepHiddenStates:
        """Return the hidden states of the step, and start the next step without any."""
        step, self._step = self._step, StepHiddenStates()
        return step

    def find_prompts(self, rows: StepRows) -> PromptStates | None:
        """Return the prompt positions of these rows whose hidden states are needed; None: there are none."""
        runs: list[_StateRun] = []
        token_indices: list[Ints64] = []
        for i, request in enumerate(rows.requests):
            start, count = int(rows.starts[i]), int(rows.counts[i])
            if request.prompt_states is not None and start < request.num_prompt:
                first = rows.token_ends[i] - count
                count = min(count, request.num_prompt - start)
                runs.append(_StateRun(request, start + count, count))
                token_indices.append(np.arange(first, first + count))
        return PromptStates(runs, np.concatenate(token_indices)) if runs else None

    def add_prompts(self, hidden: Tensor, prompts: PromptStates) -> None:
        """Add hidden [N, D] of ``prompts.token_indices``."""
        self._step.prompts.append((prompts.runs, host_copy(hidden)))  # before the next step overwrites it

    def add_sampled(self, hidden: Tensor, rows: SampledRows) -> None:
        """Add hidden [S, D] of the positions from whose logits the tokens of these rows are sampled."""
        chosen = [i for i, request in enumerate(rows.requests) if request.sampling.hidden_states]
        runs = [_StateRun(rows.requests[i], int(rows.positions[i]), 1) for i in chosen]
        if runs:
            self._step.sampled.append((runs, host_copy(hidden[self._upload(np.array(chosen, dtype=np.int64))])))
