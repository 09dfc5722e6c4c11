"""The position of a request in its grammar: the tokens that are allowed next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from aioengine.protocol.messages import Grammar


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
