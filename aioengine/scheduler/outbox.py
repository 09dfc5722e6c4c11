"""Outbox: what happened since the last ``StepOutput``, and the totals for ``Stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Ended, FinishCode, Opened, StepOutput, Totals

if TYPE_CHECKING:
    from aioengine.protocol.messages import Resumed
    from aioengine.scheduler.request import Request
    from aioengine.scheduler.stopping import Finish

FINISHED_CODES = (FinishCode.STOP, FinishCode.LENGTH, FinishCode.DEADLINE)


class Outbox:
    """Collects events until a step (or a look) takes them along."""

    __slots__ = ("_ended", "_opened", "_preempted", "totals")

    def __init__(self) -> None:
        self.totals = Totals()
        self._opened: list[Opened] = []
        self._preempted: list[int] = []
        self._ended: list[Ended] = []

    @property
    def has_events(self) -> bool:
        return bool(self._ended or self._preempted)

    def open(self, request: Request, now: float) -> None:
        """The first token is here. Preemptions before it are told now, since nobody knew the request then."""
        marks = request.marks
        marks.is_opened = True
        self._opened.append(
            Opened(request.uid, request.submit.text, marks.num_cached, marks.admitted_at or now, first_token_at=now)
        )
        self._preempted += [request.uid] * marks.num_preemptions
        self.totals.prompt_tokens += request.num_prompt
        self.totals.cached_tokens += marks.num_cached

    def resume(self, request: Request, resumed: Resumed) -> None:
        """It was opened before its processes were replaced; whoever makes its text begins anew."""
        begun, marks = resumed.begun, request.marks
        marks.is_opened = True
        marks.admitted_at, marks.num_cached = begun.admitted_at, begun.num_cached
        self._opened.append(
            Opened(
                request.uid,
                request.submit.text,
                begun.num_cached,
                begun.admitted_at,
                begun.first_token_at,
                resumed.token_ids,
                resumed.num_preemptions,
            )
        )

    def preempt(self, request: Request) -> None:
        request.marks.num_preemptions += 1
        self.totals.num_preemptions += 1
        if request.marks.is_opened:
            self._preempted.append(request.uid)

    def end(self, uid: int, finish: Finish, *, silently: bool = False) -> None:
        """A request is over; ``silently``: the frontend knows it already."""
        if finish.code in FINISHED_CODES:
            self.totals.num_finished += 1
        else:
            self.totals.num_aborted += 1
        if not silently:
            self._ended.append(Ended(uid, finish.code, finish.matched, finish.stage, finish.message))

    def clear(self) -> None:
        """Nobody is told of what happened until now; the totals stay."""
        self.take()

    def take(self, tokens: TokenColumns | None = None) -> StepOutput:
        """The tokens of a step, if there was one, with all events up to now."""
        output = StepOutput(tokens or TokenColumns(), self._opened, self._preempted, self._ended)
        self._opened, self._preempted, self._ended = [], [], []
        return output
