"""Outbox: the events since the last ``StepOutput``, and the totals for ``Stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import End, FinishCode, FirstToken, StepOutput, TextOpened, Totals

if TYPE_CHECKING:
    from aioengine.protocol.messages import Continuation
    from aioengine.scheduler.request import Request

FINISHED_CODES = (FinishCode.STOP, FinishCode.LENGTH, FinishCode.DEADLINE)


class Outbox:
    """Collects events until ``take``."""

    __slots__ = ("_ended", "_opened", "_preempted", "totals")

    def __init__(self) -> None:
        self.totals = Totals()
        self._opened: list[TextOpened] = []
        self._preempted: list[int] = []
        self._ended: list[End] = []

    @property
    def has_events(self) -> bool:
        """Whether there is anything to send although no step has a result."""
        return bool(self._ended or self._preempted)

    def open_text(self, request: Request, now: float) -> None:
        """Its first token is here. Preemptions before it are sent now: the detokenizer did not know the request."""
        marks = request.marks
        marks.is_text_open = True
        first_token = FirstToken(request.uid, marks.num_cached, marks.admitted_at or now, now)
        self._opened.append(TextOpened(first_token, request.submit.text))
        self._preempted += [request.uid] * marks.num_preemptions
        self.totals.prompt_tokens += request.num_prompt
        self.totals.cached_tokens += marks.num_cached

    def reopen_text(self, request: Request, continuation: Continuation) -> None:
        """It had its first token before its processes were replaced; the detokenizer begins its text anew."""
        first_token, marks = continuation.first_token, request.marks
        marks.is_text_open = True
        marks.admitted_at, marks.num_cached = first_token.admitted_at, first_token.num_cached
        opened = TextOpened(first_token, request.submit.text, continuation.token_ids, continuation.num_preemptions)
        self._opened.append(opened)

    def preempt(self, request: Request) -> None:
        request.marks.num_preemptions += 1
        self.totals.num_preemptions += 1
        if request.marks.is_text_open:
            self._preempted.append(request.uid)

    def end(self, end: End, *, is_known: bool = False) -> None:
        """A request is over; ``is_known``: the frontend knows already, and only the totals change."""
        if end.code in FINISHED_CODES:
            self.totals.num_finished += 1
        else:
            self.totals.num_aborted += 1
        if not is_known:
            self._ended.append(end)

    def clear(self) -> None:
        """Drop the events; the totals stay."""
        self.take()

    def take(self, tokens: TokenColumns | None = None) -> StepOutput:
        """The tokens of a step, if there was one, with all events up to now."""
        output = StepOutput(tokens or TokenColumns(), self._opened, self._preempted, self._ended)
        self._opened, self._preempted, self._ended = [], [], []
        return output
