"""Requests whose output a grammar constrains: which tokens of launched steps their constraints have not followed yet.

The mask of a token depends on the token before it. A step is launched while the one before it still runs on the device,
so its forward is queued first; then the host waits for the last tokens, follows them, and computes the masks while the
device computes. That is the wait which comes anyway, when the older step is collected.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from aioengine.runner.sampling.sampler import FAILED

if TYPE_CHECKING:
    from aioengine.runner.logits import Constraint, Grammars
    from aioengine.runner.rows import RequestRow
    from aioengine.runner.transfer import Readback
    from aioengine.scheduler.plan import NewRow


class Launched(Protocol):
    """A launched step; see ``model_runner.Ticket``."""

    @property
    def sampled(self) -> list[int]: ...
    @property
    def values(self) -> Readback: ...
    @property
    def failed(self) -> dict[int, str]: ...
    @property
    def constraints(self) -> dict[int, Constraint]: ...
    @property
    def complete(self) -> list[int]: ...


class ConstrainedRows:
    """The open constraints.

    Attributes:
        grammars: where constraints come from; None: this runner has none.
    """

    def __init__(self) -> None:
        self.grammars: Grammars | None = None
        self._unfollowed: deque[Launched] = deque()

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Give an open request the constraint of its grammar, behind its output so far.

        Raises:
            ValueError: there are no grammars, or this one cannot be followed.
        """
        grammar = opened.sampling.grammar
        if self.grammars is None or grammar is None:
            message = "this runner has no grammars"
            raise ValueError(message)
        request.constraint = self.grammars.open(grammar, opened.token_ids, opened.num_prompt)

    def note(self, ticket: Launched, sampled: list[RequestRow]) -> None:
        """A step was launched that gives tokens to ``sampled``. Those whose masks failed fail in it."""
        for place, request in enumerate(sampled):
            if request.constraint is not None:
                ticket.constraints[place] = request.constraint
                if request.constraint.error:
                    ticket.failed[request.uid] = request.constraint.error
        if ticket.constraints:
            self._unfollowed.append(ticket)

    def follow(self, last: Launched | None = None) -> None:
        """Follow the tokens of the launched steps, up to ``last``, and wait for them."""
        if last is not None and last not in self._unfollowed:
            return
        ticket = None
        while self._unfollowed and (last is None or ticket is not last):
            ticket = self._unfollowed.popleft()
            values = ticket.values.wait()
            for place, constraint in ticket.constraints.items():
                if values[place] == FAILED or constraint.is_over:
                    continue
                constraint.advance(values[place])
                if constraint.error:
                    ticket.failed[ticket.sampled[place]] = constraint.error
                elif constraint.is_complete:
                    ticket.complete.append(ticket.sampled[place])
