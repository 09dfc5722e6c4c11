"""Logits processors. ``PLUGIN`` of a module is its class; modules with several classes are in ``ALIASES``.

Processors change fp32 logits in place, and only the rows that use them. Other rows keep the bits of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aioengine import plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Grammar, Sampling
    from aioengine.runner.token_lists import TokenLists
    from aioengine.runner.transfer import Upload

ORDER = ("min_new_tokens", "penalties", "bias", "allowed_token_ids", "bad_words", "grammar")
"""The processors, in the order of their application. Processors that forbid tokens come last, so that no later
processor raises the logit of a forbidden token.
"""

ALIASES = {
    "allowed_token_ids": "_token_lists:AllowedTokenIds",
    "bias": "_token_lists:Bias",
    "min_new_tokens": "_token_lists:MinNewTokens",
}


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

    def fill(self, constraints: Sequence[Any], masks: npt.NDArray[np.int32]) -> None:
        """Write the allowed next tokens as bits of masks [constraints, num_words]."""
        ...

    def begin(self, constraints: Sequence[Any], masks: npt.NDArray[np.int32]) -> Callable[[], None]:
        """Start ``fill`` of masks [constraints, num_words] in the background. The returned function waits for it, and
        must be called.
        """
        ...


@dataclass(slots=True)
class LogitsRow:
    """A row of logits and its request.

    Attributes:
        index: the row in the logits. uid: the request.
        num_tokens: number of tokens before the sampled token, prompt and output.
        history: [at least num_tokens] int64, the tokens, for penalties on a CPU; -1 for a prompt given as embeddings.
        first_id: index of the first token with an id, after a prompt given as embeddings.
        constraint: the grammar state.
        lists: the token lists of its parameters.
        recent: [R] int32 on the device, for requests with ``bad_token_ids``: the token of position p at p % R; -1 if
            there is none.
    """

    index: int
    sampling: Sampling
    num_prompt: int
    num_tokens: int
    history: Tensor | None
    uid: int = -1
    first_id: int = 0
    constraint: RowConstraint | None = None
    lists: TokenLists | None = None
    recent: Tensor | None = None

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt


class LogitsProcessor(Protocol):
    """A sampler has one instance. It may keep scratch memory, but no state of requests."""

    def wants(self, sampling: Sampling) -> bool:
        """Return whether a request with these parameters needs this processor."""
        ...

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Change ``rows`` of logits [S, W] fp32 in place. ``upload`` copies host data without waiting for the GPU."""
        ...


def load(custom: LogitsProcessor | None = None) -> tuple[LogitsProcessor, ...]:
    """Return the processors of ``ORDER``, with ``custom`` before the processors that forbid tokens."""
    processors: list[LogitsProcessor] = [plugins.load("runner/logits", name)() for name in ORDER]
    if custom is not None:
        processors.insert(ORDER.index("allowed_token_ids"), custom)
    return tuple(processors)
