"""The open requests and the rows of a step that sample a token.

S rows that sample, D model size, R recent tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.protocol.messages import Grammar, Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner.token_lists import NO_LISTS, TokenLists

_NONE = torch.zeros(0)
_NOT_FINITE = "the model produced non-finite values (NaN or inf) for this request: its weights or its dtype overflow"


@dataclass(slots=True)
class RowLogprobs:
    """The logprobs of an open request.

    Attributes:
        uid, num_prompt: as in ``RequestRow``.
        rules: the requested logprobs.
        size_class: requests of one class are computed together. 0 for up to ``FEW_VALUES`` logprobs per position, else
            the bit length of their number.
        returns_next: a SCORE request: it gets logprobs of the next token after the prompt, but no token.
        prompt: token ids [X] of the prompt if its positions get logprobs, else empty.
        parts: packed logprobs of the prompt computed so far.
    """

    uid: int
    num_prompt: int
    rules: LogprobRules
    size_class: int
    returns_next: bool
    prompt: Ints64
    parts: list[bytes]


@dataclass(slots=True)
class RequestRow:
    """An open request.

    Attributes:
        history: [at least its tokens] int64, for penalties on a CPU, else empty; -1 for a prompt given as embeddings.
        token_ids: the tokens with which it was opened, for penalties on a GPU (``TokenCounts``); else empty.
        prompt_states: hidden states of the prompt computed so far; None: not needed (any more).
        second_text: index of the first token of the second text of a pair; 0: there is none.
        embeds: [num_prompt, D] of a prompt given as embeddings, until it is computed.
        first_id: the first token with an id, after a prompt given as embeddings.
        constraint: the grammar state. may_force: forced tokens may be appended without sampling.
        forced: the last forced tokens. forced_end: number of tokens after them.
        is_pooled: the request is of kind POOL. is_long: as in ``NewRow``.
        lists: the token lists of its parameters.
        recent: [R] int32 on the device, for bad words, else empty: the token of position p is at p % R; -1: there is
            none.
    """

    uid: int
    row_index: int
    sampling: Sampling
    num_prompt: int
    history: Tensor = _NONE
    token_ids: Sequence[int] = ()
    logprobs: RowLogprobs | None = None
    prompt_states: list[bytes] | None = None
    second_text: int = 0
    embeds: npt.NDArray[np.float32] | None = None
    first_id: int = 0
    constraint: OpenConstraint | None = None
    may_force: bool = False
    forced: Sequence[int] = ()
    forced_end: int = 0
    is_pooled: bool = False
    is_long: bool = False
    lists: TokenLists = NO_LISTS
    recent: Tensor = _NONE

    def constraint_at(self, position: int) -> RowConstraint | None:
        """Return the tokens that the grammar allows at ``position``. After forced tokens, a step in flight samples a
        token that is already known.
        """
        if self.constraint is None or position >= self.forced_end:
            return self.constraint
        return Forced(self.forced[position - self.forced_end], self.constraint.source)


def why_no_token(request: RequestRow | None, *, is_empty: bool) -> str:
    """Return why no token could be sampled for a request. None: it was closed.

    is_empty: its grammar and its token lists allow no token.
    """
    if request is None:
        return _NOT_FINITE
    sampling = request.sampling
    if sampling.custom_processor:
        return _NOT_FINITE + f"; or custom_logit_processor {sampling.custom_processor!r} returned them"
    lists = {"allowed_token_ids": sampling.allowed_token_ids, "bad_words": sampling.bad_token_ids}
    names = [name for name, ids in lists.items() if ids]
    if not names:
        return _NOT_FINITE
    if sampling.grammar is not None:
        names.append(sampling.grammar.parameter)
    reason = f"no token is allowed by {' and '.join(names)}{' together' * (len(names) > 1)}"
    return f"{reason}; allow one more" if is_empty else f"{reason}; or {_NOT_FINITE}"


class LogitsRow(NamedTuple):
    """Row ``index`` of logits. num_tokens: number of tokens of the request before the sampled token."""

    index: int
    request: RequestRow
    num_tokens: int

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.request.num_prompt


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The S rows of a step that sample a token. positions: position of the new token in its request."""

    requests: list[RequestRow]
    row_indices: Ints64
    positions: Ints64
    records: npt.NDArray[np.void]  # of SAMPLING_RECORD

    def constraints(self) -> list[RowConstraint | None]:
        """Return the constraint of the new token of each row."""
        return [
            request.constraint_at(position)
            for request, position in zip(self.requests, self.positions.tolist(), strict=True)
        ]

    def part(self, chosen: Ints64, offsets: Ints64 | int = 0) -> SampledRows:
        """Return the rows ``chosen`` [X], at positions that are ``offsets`` [X] higher."""
        requests = [self.requests[i] for i in chosen.tolist()]
        return SampledRows(requests, self.row_indices[chosen], self.positions[chosen] + offsets, self.records[chosen])


def needs_only_temperature(records: npt.NDArray[np.void], *, aside_from: int = 0) -> bool:
    """Return whether rows need only a temperature. records: [R] of SAMPLING_RECORD. aside_from: bits of processors to
    ignore.
    """
    processors = records["processors"] & ~aside_from
    return not (processors.any() or (records["is_truncated"] & ~records["is_greedy"]).any())


class RowConstraint(Protocol):
    """The tokens that a grammar allows at one position of a request.

    Attributes:
        source: computes the mask.
        is_complete: no further token is allowed.
        error: why the grammar cannot be followed further; empty: no error.
        next_token: the only allowed token; -1: the mask has the allowed tokens.
    """

    is_complete: bool
    error: str
    next_token: int

    @property
    def source(self) -> GrammarSource: ...


@dataclass(slots=True)
class Forced:
    """The constraint of a token that an earlier result returned as a forced token."""

    next_token: int
    source: GrammarSource
    is_complete: bool = False
    error: str = ""


class OpenConstraint(RowConstraint, Protocol):
    """The position of a request in its grammar, and the tokens that are allowed there."""

    @property
    def is_over(self) -> bool:
        """Whether it is complete or has an error."""
        ...

    def advance(self, token_id: int) -> None:
        """Follow the next token of the request."""
        ...

    def copy(self) -> OpenConstraint:
        """Return a copy that advances on its own."""
        ...

    def take_forced(self, at_least: int, at_most: int) -> list[int]:
        """Return and follow the forced next tokens; empty if there are fewer than ``at_least``."""
        ...


class GrammarSource(Protocol):
    """The grammars of an engine. num_words: int32 words of a mask, 32 tokens each."""

    num_words: int

    def open(self, grammar: Grammar, token_ids: Sequence[int], num_prompt: int) -> OpenConstraint:
        """Follow a grammar from its start through the tokens of a request: prompt, then output.

        Raises:
            ValueError: the grammar cannot be compiled, or does not allow the output.
        """
        ...

    def fill(self, constraints: Sequence[Any], masks: Ints32) -> None:
        """Write the allowed next tokens as bits of masks [constraints, num_words]."""
        ...

    def begin(self, constraints: Sequence[Any], masks: Ints32) -> Callable[[], None]:
        """Start ``fill`` of masks [constraints, num_words] in the background. The returned function waits for it, and
        must be called.
        """
        ...
