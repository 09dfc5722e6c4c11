"""What changes logits before sampling, one processor a file; ``PLUGIN`` of a module is its class.

Processors work in place on fp32 logits and only touch the rows that use them, so that every other row stays as the
model made it, bit for bit.
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
"""The processors, in the order in which they are applied. Those that rule tokens out come last: no later one may lift
a ruled out token again.
"""


class RowConstraint(Protocol):
    """The tokens that a grammar allows at one position of a request.

    Attributes:
        source: computes the mask. is_complete: no token is allowed. error: the reason why the grammar cannot be
            followed, or empty. next_token: the only allowed token; -1: the mask has the allowed tokens.
    """

    is_complete: bool
    error: str
    next_token: int

    @property
    def source(self) -> GrammarSource: ...


@dataclass(slots=True)
class Forced:
    """The constraint of a token that an earlier result gave as a forced token."""

    next_token: int
    source: GrammarSource
    is_complete: bool = False
    error: str = ""


class OpenConstraint(RowConstraint, Protocol):
    """The position of one request in its grammar, and the tokens that are allowed there."""

    @property
    def is_over(self) -> bool:
        """Whether it is complete or has an error."""
        ...

    def advance(self, token_id: int) -> None:
        """The request has this token next."""
        ...

    def take_forced(self, at_least: int, at_most: int) -> list[int]:
        """The next tokens where no others are allowed, which the request has then; none if there are fewer."""
        ...


class GrammarSource(Protocol):
    """The grammars of an engine. num_words: of a mask, 32 tokens each."""

    num_words: int

    def open(self, grammar: Grammar, token_ids: Sequence[int], num_prompt: int) -> OpenConstraint:
        """Follow a grammar from its beginning, behind the tokens of the request: prompt, then output.

        Raises:
            ValueError: it cannot be compiled, or followed.
        """
        ...

    def fill(self, constraints: Sequence[Any], masks: npt.NDArray[np.int32]) -> None:
        """The tokens that each may have next, as bits of masks [constraints, num_words]."""
        ...

    def begin(self, constraints: Sequence[Any], masks: npt.NDArray[np.int32]) -> Callable[[], None]:
        """As ``fill`` of masks [constraints, num_words], beside the caller. The result waits, and must be called."""
        ...


@dataclass(slots=True)
class LogitsRow:
    """A row of logits and the request that it belongs to.

    index: its row in the logits. uid: of the request.
    num_tokens: tokens before the one that is sampled now, prompt and output.
    history: [at least num_tokens] int64, the tokens, on the CPU of requests with penalties. It holds -1 for a prompt of
        embeddings.
    first_id: where the ids begin in it: behind a prompt of embeddings.
    constraint: of a request with a grammar.
    lists: the lists of tokens among its parameters, where it has any.
    recent: [R] int32 on the device of the logits, the token of position p at p % R; only of requests with
        ``bad_token_ids``. It holds -1 where there is none.
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
    """One instance for a sampler; it may keep scratch memory, but nothing about a request."""

    def wants(self, sampling: Sampling) -> bool:
        """Whether a request with these parameters ever needs it."""
        ...

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Change ``rows`` of the logits [S, W] fp32 in place. Data of the host goes through ``upload``, which does not
        wait for the GPU.
        """
        ...


def load(custom: LogitsProcessor | None = None) -> tuple[LogitsProcessor, ...]:
    """The processors of ``ORDER``, and ``custom`` before those that rule tokens out."""
    found: list[LogitsProcessor] = [plugins.load("runner/logits", name)() for name in ORDER]
    if custom is not None:
        found.insert(ORDER.index("allowed_token_ids"), custom)
    return tuple(found)
