"""Follows the grammars of open requests with structured output.

The mask of a token depends on the previous token, which is unknown while its step is in flight. So the forward pass of
the next step is queued first, and its tokens are sampled later. When the previous step is collected, the host follows
its tokens and starts to compute the masks in background threads. Meanwhile it sends the tokens and prepares the next
step. Just before the next step is launched, the masks are done and the tokens are sampled.

A grammar may allow only one token at each of the next positions. These *forced tokens* are returned together with the
last sampled token. The next row of the request computes them like a prompt. A row in flight samples the first forced
token again, so it returns no token.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from aioengine.runner.logits.grammar import GrammarMask
from aioengine.runner.request_row import GrammarSource, RequestRow, SampledRows
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.ticket import Ticket
from aioengine.runner.timing import profiled
from aioengine.scheduler.plan import NewRow

if TYPE_CHECKING:
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs, DecodeStep

MIN_FORCED: Final = 1
MIN_FORCED_ON_GPU: Final = 2
"""Minimum number of forced tokens that are appended. The step in flight computes one of them anyway. Must be at least
the number of steps in flight.
"""

ROWS_PER_TOKEN: Final = 16
"""The minimum grows by one for every 16 rows of the step: all rows wait for the row with forced tokens, and only that
row saves steps. With 256 rows, few forced tokens make all rows slower.
"""


@dataclass(slots=True)
class _DeferredStep:
    """A step whose tokens are sampled when its masks are known.

    sample: samples the tokens [R]. max_rows: with more rows, masks are not computed in the background.
    """

    rows: SampledRows
    sample: Callable[[], Tensor]
    max_rows: int
    ticket: Ticket | None = None


class ConstrainedRows:
    """The constraints of open requests.

    Attributes:
        grammars: opens constraints; None: grammars are not available.
        min_forced: minimum number of forced tokens that are appended, in a step of few rows.
        max_tokens: maximum tokens of a step with forced tokens. On a GPU: the largest decode step with a graph, because
            other steps take the host several times as long.
    """

    def __init__(self, masks: GrammarMask, device: torch.device, *, may_force: bool = True) -> None:
        """masks: the logits processor of grammars. may_force: forced tokens may be appended."""
        self.grammars: GrammarSource | None = None
        self.min_forced = MIN_FORCED if device.type == "cpu" else MIN_FORCED_ON_GPU
        self.max_tokens = sys.maxsize
        self._deferred: _DeferredStep | None = None  # the newest step, until its tokens are sampled
        self._masks = masks
        self._may_force = may_force
        self._is_on_gpu = device.type != "cpu"
        self._unfollowed: deque[Ticket] = deque()

    def sample_or_defer(
        self, rows: SampledRows, sample: Callable[[], Tensor], *, max_rows: int, is_urgent: bool = False
    ) -> Tensor | None:
        """Return the sampled tokens [R]; None: they are sampled later, because masks depend on unknown tokens.

        max_rows: rows that ``sample`` samples together. is_urgent: wait for the unknown tokens instead.
        """
        if self._unfollowed and any(request.constraint is not None for request in rows.requests):
            if not is_urgent:
                self._deferred = _DeferredStep(rows, sample, max_rows)
                return None
            self.follow()
        return sample()

    def sample_masked(self, graphs: DecodeGraphs, step: DecodeStep, rows: SampledRows) -> Tensor | None:
        """Do the same as ``sample_or_defer``, [R], for a replayed step that only needs masks.

        The masks are applied in the logits of the graph. With a copy of the logits and the full sampler, the device
        would wait longer for its next step.
        """

        def sample() -> Tensor:
            """Return token ids [R]."""
            logits = graphs.logits(step)
            with profiled("sample"):
                self._masks.mask(logits, step.masked or (), rows.constraints())
                return graphs.draw(step, logits)

        return self.sample_or_defer(rows, sample, max_rows=graphs.max_rows)

    def begin_masks(self) -> None:
        """Start to compute the masks of the deferred step in the background, if all earlier tokens are known."""
        step = self._deferred
        if step is not None and not self._unfollowed and len(step.rows.requests) <= step.max_rows:
            self._masks.begin(step.rows.constraints(), is_on_gpu=self._is_on_gpu)

    def sample_deferred(self) -> None:
        """Sample the tokens of the deferred step."""
        step, self._deferred = self._deferred, None
        if step is not None and step.ticket is not None:
            self.follow()
            with torch.inference_mode():
                step.ticket.values.start(step.sample())
            self.note(step.ticket, step.rows)

    def open(self, opened: NewRow, request: RequestRow) -> None:
        """Set the constraint of an open request, after its output so far.

        Raises:
            ValueError: grammars are not available, or this grammar cannot be followed.
        """
        grammar = opened.sampling.grammar
        if self.grammars is None or grammar is None:
            raise ValueError("this runner has no grammars")
        request.constraint = self.grammars.open(grammar, opened.token_ids, opened.num_prompt)
        request.may_force = self._may_force and _may_force(opened)

    def note(self, ticket: Ticket, rows: SampledRows, followed: Collection[int] = ()) -> None:
        """Record a launched step that samples tokens of these rows. Rows whose grammar has an error fail.

        followed: indices of rows whose token was followed.
        """
        if self._deferred is not None:
            self._deferred.ticket = ticket
            return
        for index, (request, position) in enumerate(zip(rows.requests, rows.positions.tolist(), strict=True)):
            constraint = request.constraint
            if position < request.forced_end:
                ticket.repeated.add(request.uid)
            elif constraint is not None:
                if index not in followed:
                    ticket.constrained.append((index, position, request, constraint))
                elif constraint.is_complete:
                    ticket.complete.append(request.uid)
                if constraint.error:
                    ticket.failed[request.uid] = constraint.error
        if ticket.constrained:
            self._unfollowed.append(ticket)

    def follow(self, last: Ticket | None = None) -> None:
        """Wait for the tokens of launched steps up to ``last``, or of all, and follow them."""
        if last is not None and last not in self._unfollowed:
            return
        ticket = None
        while self._unfollowed and (last is None or ticket is not last):
            ticket = self._unfollowed.popleft()
            values = ticket.values.wait()
            left = self.max_tokens - len(ticket.sampled)
            min_forced = self.min_forced + len(ticket.sampled) // ROWS_PER_TOKEN
            for index, position, request, constraint in ticket.constrained:
                if values[index] == FAILED or constraint.is_over:
                    continue
                constraint.advance(values[index])
                may_force = constraint.next_token >= 0 and request.may_force  # rarely true: saves a call per token
                if may_force and (forced := constraint.take_forced(min_forced, left)):
                    left -= len(forced)
                    ticket.forced[request.uid] = forced
                    request.forced = forced
                    request.forced_end = position + 1 + len(forced)
                if constraint.error:
                    ticket.failed[request.uid] = constraint.error
                elif constraint.is_complete:
                    ticket.complete.append(request.uid)

    def allow_no_token(self, request: RequestRow) -> bool:
        """Return whether the grammar of a request and its token lists certainly allow no next token."""
        constraint, sampling = request.constraint, request.sampling
        if constraint is None or constraint.is_over:
            return False
        allowed = {constraint.next_token}
        if constraint.next_token < 0:
            self._masks.begin((), is_on_gpu=False)  # waits for masks that are being computed
            masks = np.empty((1, constraint.source.num_words), dtype=np.int32)
            constraint.source.fill([constraint], masks)
            allowed = {*np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()}
        allowed.intersection_update(sampling.allowed_token_ids or allowed)
        return allowed <= {ids[0] for ids in sampling.bad_token_ids if len(ids) == 1}


def _may_force(opened: NewRow) -> bool:
    """Return whether tokens of this request may be appended without sampling: no parameter needs their logits, counts
    them or forbids them.
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
