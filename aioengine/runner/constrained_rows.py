"""Requests whose output a grammar constrains: which tokens of launched steps their constraints have not followed yet.

The mask of a token depends on the token before it. A step is launched while the one before it still runs on the device,
so its forward is queued first, and its tokens are drawn later: when the older step is collected, the host follows the
last tokens, and begins to compute the masks in other threads while the device computes. Then it sends the tokens and
plans the next step, before whose launch the masks are there and the tokens are drawn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.runner.sampling.sampler import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.runner.logits import Constraint, Grammars
    from aioengine.runner.logits.grammar import GrammarMask
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


@dataclass(slots=True)
class _Later:
    """A step whose tokens are drawn once its masks are computed. draw: returns them, [R]."""

    requests: list[RequestRow]
    draw: Callable[[], Tensor]
    ticket: Launched | None = None


class ConstrainedRows:
    """The open constraints.

    Attributes:
        grammars: where constraints come from; None: this runner has none.
    """

    def __init__(self, masks: GrammarMask, device: torch.device) -> None:
        """``masks``: where the sampler gets its masks from."""
        masks.follow = self.follow
        self.grammars: Grammars | None = None
        self._later: _Later | None = None  # the newest step, while its tokens are not drawn
        self._masks = masks
        self._is_on_gpu = device.type != "cpu"
        self._unfollowed: deque[Launched] = deque()

    def put_off(self, requests: list[RequestRow], draw: Callable[[], Tensor]) -> bool:
        """Whether the tokens [R] of a step are drawn later: their masks depend on tokens that are not known yet."""
        if self._unfollowed and any(each.constraint is not None for each in requests):
            self._later = _Later(requests, draw)
        return self._later is not None

    def begin_masks(self) -> None:
        """Compute the masks of the step that was put off, beside the caller, once it follows all tokens before."""
        if self._later is not None and not self._unfollowed:
            self._masks.begin([each.constraint for each in self._later.requests], is_on_gpu=self._is_on_gpu)

    def finish(self) -> None:
        """Draw the tokens of the step that was put off."""
        later, self._later = self._later, None
        if later is not None and later.ticket is not None:
            with torch.inference_mode():
                later.ticket.values.start(later.draw())
            self.note(later.ticket, later.requests)

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
        if self._later is not None:
            self._later.ticket = ticket
            return
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
