"""Hidden states for requests that ask for them, copied to the host after the step.

The hidden state of an output token is the state of the previous position: the token is sampled from its logits. If a
request asks for all hidden states, the states of the prompt are returned with the first output token, in blocks.

N positions, T tokens of the step, S rows that sample, D model size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from aioengine.kernels.arrays import Ints64
from aioengine.protocol.columns import HIDDEN_STATES, PROMPT_STATES, Extra, block_extras
from aioengine.runner.inputs import StepRows
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.transfer import Upload, host_copy


class PromptStates(NamedTuple):
    """The prompt positions whose hidden states a step returns.

    counts: requests, each with the number of its consecutive positions. token_indices: [N] int64, the positions of all
    these requests as indices among the tokens of the step.
    """

    counts: list[tuple[RequestRow, int]]
    token_indices: Ints64


_States = tuple[list[tuple[RequestRow, int]], Tensor]
"""Requests, each with a number, and their hidden states [N, D]; see ``StepHiddenStates``."""


@dataclass(slots=True)
class StepHiddenStates:
    """The hidden states of a step, while they are copied to the host.

    Attributes:
        prompts: ``PromptStates.counts``, and the hidden states [N, D].
        sampled: in the order of sampling: requests, each with the index of a sampled token in its output, and the
            hidden states [N, D] of the positions before these tokens.
    """

    prompts: list[_States] = field(default_factory=list[_States])
    sampled: list[_States] = field(default_factory=list[_States])

    def extras(self) -> list[Extra]:
        """Return the hidden states as extras. Call it when the device has computed the step.

        Prompt states are kept until the first output token.
        """
        for counts, hidden in self.prompts:
            states = hidden.float().split([count for _, count in counts])
            for (request, _), own in zip(counts, states, strict=True):
                if request.prompt_states is not None:
                    request.prompt_states.append(own.numpy().tobytes())
        extras: list[Extra] = []
        for indices, hidden in self.sampled:
            for (request, index), state in zip(indices, hidden.float().numpy(), strict=True):
                data = state.tobytes()
                if request.prompt_states is not None:  # the first token: its state is the last of the prompt
                    prompt = b"".join(request.prompt_states)
                    extras += block_extras(request.uid, PROMPT_STATES, prompt[: -len(data)], len(data))
                    request.prompt_states = None
                extras.append(Extra(request.uid, index, HIDDEN_STATES, data))
        return extras


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
        counts: list[tuple[RequestRow, int]] = []
        token_indices: list[Ints64] = []
        for i, request in enumerate(rows.requests):
            start, count = int(rows.starts[i]), int(rows.counts[i])
            if request.prompt_states is not None and start < request.num_prompt:
                first = rows.token_ends[i] - count
                count = min(count, request.num_prompt - start)
                counts.append((request, count))
                token_indices.append(np.arange(first, first + count))
        return PromptStates(counts, np.concatenate(token_indices)) if counts else None

    def add_prompts(self, hidden: Tensor, prompts: PromptStates) -> None:
        """Add hidden [N, D] of ``prompts.token_indices``."""
        self._step.prompts.append((prompts.counts, host_copy(hidden)))  # before the next step overwrites it

    def add_sampled(self, hidden: Tensor, rows: SampledRows) -> None:
        """Add hidden [S, D] of the positions from whose logits the tokens of these rows are sampled."""
        chosen = [i for i, request in enumerate(rows.requests) if request.sampling.hidden_states]
        indices = [(rows.requests[i], int(rows.positions[i]) - rows.requests[i].num_prompt) for i in chosen]
        if indices:
            self._step.sampled.append((indices, host_copy(hidden[self._upload(np.array(chosen, dtype=np.int64))])))
