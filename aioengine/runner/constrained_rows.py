"""Requests whose output a grammar constrains: which tokens of launched steps their constraints have not followed yet.

The mask of a token depends on the token before it. A step is launched while the one before it still runs on the device,
so its forward is queued first, and its tokens are drawn later: when the older step is collected, the host follows the
last tokens, and begins to compute the masks in other threads while the device computes. Then it sends the tokens, plans
the next step and prepares its inputs. By then the masks are there, and the tokens are drawn before it is launched.

If a grammar allows only one token at several positions in a row, the request *jumps*: these forced tokens are returned
together with the last drawn one, and its next row computes them like a prompt. A row in flight draws the first of them
again, so it returns no token.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.timing import part

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.graphs.decode_graphs import DecodeGraphs, DecodeStep
    from aioengine.runner.logits import GrammarSource, OpenConstraint
    from aioengine.runner.logits.grammar import GrammarMask
    from aioengine.runner.rows import RequestRow, SampledRows
    from aioengine.runner.transfer import Readback
    from aioengine.scheduler.plan import NewRow

    Awaited = tuple[int, int, RequestRow, OpenConstraint]

MIN_JUMP: Final = 1
MIN_JUMP_ON_GPU: Final = 2
"""Forced tokens that are worth a jump: while the next step is in flight, one of them is computed in it anyway. Not
fewer than steps can be in flight.
"""

ROWS_PER_TOKEN: Final = 16
"""The least jump is one token longer for every 16 rows of the step: all of them wait for the tokens of the row that
jumps, and it alone saves steps. With 256 rows short jumps make all slower.
"""


class Launched(Protocol):
    """A launched step; see ``model_runner.Ticket``.

    constrained: the place in ``sampled``, the position and the request of each token that this constraint follows.
    repeated: uids of the rows whose token was already returned as a forced token.
    """

    @property
    def sampled(self) -> list[int]: ...
    @property
    def values(self) -> Readback: ...
    @property
    def failed(self) -> dict[int, str]: ...
    @property
    def constrained(self) -> list[Awaited]: ...
    @property
    def repeated(self) -> set[int]: ...
    @property
    def jumps(self) -> dict[int, list[int]]: ...
    @property
    def complete(self) -> list[int]: ...


@dataclass(slots=True)
class _Later:
    """A step whose tokens are drawn once its masks are computed. draw: returns them, [R]; at most ``most`` rows are
    drawn together, else its masks are not begun beside.
    """

    rows: SampledRows
    draw: Callable[[], Tensor]
    most: int
    ticket: Launched | None = None


class ConstrainedRows:
    """The open constraints.

    Attributes:
        grammars: where constraints come from; None: this runner has none.
        min_jump: forced tokens that are worth a jump in a step of few rows.
        max_tokens: of a step with jumps. On a GPU those of the largest decode step that has a graph: any other step
            takes the host several times as long.
    """

    def __init__(self, masks: GrammarMask, device: torch.device, *, may_jump: bool = True) -> None:
        """``masks``: where the sampler gets its masks from. ``may_jump``: whether requests may."""
        self.grammars: GrammarSource | None = None
        self.min_jump = MIN_JUMP if device.type == "cpu" else MIN_JUMP_ON_GPU
        self.max_tokens = sys.maxsize
        self._later: _Later | None = None  # the newest step, while its tokens are not drawn
        self._masks = masks
        self._may_jump = may_jump
        self._is_on_gpu = device.type != "cpu"
        self._unfollowed: deque[Launched] = deque()

    def draw(
        self, rows: SampledRows, draw: Callable[[], Tensor], *, most: int, is_urgent: bool = False
    ) -> Tensor | None:
        """Return the tokens [R] of a step. None: they are drawn later, because masks depend on unknown tokens.

        most: number of rows that ``draw`` draws together. is_urgent: wait for the unknown tokens instead.
        """
        if self._unfollowed and any(request.constraint is not None for request in rows.requests):
            if not is_urgent:
                self._later = _Later(rows, draw, most)
                return None
            self.follow()
        return draw()

    def draw_masked(self, graphs: DecodeGraphs, step: DecodeStep, rows: SampledRows) -> Tensor | None:
        """As ``draw``, [R], of a replayed step that needs masks. They are set in the logits of the graph: with a copy
        of these, and a sampler for all parameters, the device would wait longer for its next step.
        """

        def draw() -> Tensor:
            """Token ids [R]."""
            logits = graphs.logits(step)
            with part("sample"):
                self._masks.mask(logits, step.lasts or range(len(rows.requests)), rows.constraints())
                return graphs.draw(step, logits)

        return self.draw(rows, draw, most=graphs.max_rows)

    def begin_masks(self) -> None:
        """Compute the masks of the step that was put off, beside the caller, once it follows all tokens before."""
        later = self._later
        if later is not None and not self._unfollowed and len(later.rows.requests) <= later.most:
            self._masks.begin(later.rows.constraints(), is_on_gpu=self._is_on_gpu)

    def finish(self) -> None:
        """Draw the tokens of the step that was put off."""
        later, self._later = self._later, None
        if later is not None and later.ticket is not None:
            self.follow()
            with torch.inference_mode():
                later.ticket.values.start(later.draw())
            self.note(later.ticket, later.rows.requests, later.rows.positions)

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
        request.may_jump = self._may_jump and _may_jump(opened)

    def note(self, ticket: Launched, sampled: list[RequestRow], positions: npt.NDArray[np.int64]) -> None:
        """A step was launched that gives tokens to ``sampled``, at these positions [S]. Those whose masks failed fail
        in it.
        """
        if self._later is not None:
            self._later.ticket = ticket
            return
        for place, (request, position) in enumerate(zip(sampled, positions.tolist(), strict=True)):
            constraint = request.constraint
            if position < request.forced_end:
                ticket.repeated.add(request.uid)
            elif constraint is not None:
                ticket.constrained.append((place, position, request, constraint))
                if constraint.error:
                    ticket.failed[request.uid] = constraint.error
        if ticket.constrained:
            self._unfollowed.append(ticket)

    def follow(self, last: Launched | None = None) -> None:
        """Follow the tokens of the launched steps, up to ``last``, and wait for them."""
        if last is not None and last not in self._unfollowed:
            return
        ticket = None
        while self._unfollowed and (last is None or ticket is not last):
            ticket = self._unfollowed.popleft()
            values = ticket.values.wait()
            left = self.max_tokens - len(ticket.sampled)
            least = self.min_jump + len(ticket.sampled) // ROWS_PER_TOKEN
            for place, position, request, constraint in ticket.constrained:
                if values[place] == FAILED or constraint.is_over:
                    continue
                constraint.advance(values[place])
                may_jump = constraint.next_token >= 0 and request.may_jump  # few do: the call is spared for the others
                if may_jump and (forced := constraint.take_forced(least, left)):
                    left -= len(forced)
                    ticket.jumps[request.uid] = forced
                    request.forced = forced
                    request.forced_end = position + 1 + len(forced)
                if constraint.error:
                    ticket.failed[request.uid] = constraint.error
                elif constraint.is_complete:
                    ticket.complete.append(request.uid)


def _may_jump(opened: NewRow) -> bool:
    """Whether tokens of this request need not be drawn: nothing asks for their logits, counts them, or rules them out
    as well.
    """
    sampling = opened.sampling
    return opened.logprobs is None and not (
        sampling.hidden_states
        or sampling.has_penalties
        or sampling.min_new_tokens
        or sampling.bad_token_ids
        or sampling.allowed_token_ids
        or sampling.custom_processor
    )
