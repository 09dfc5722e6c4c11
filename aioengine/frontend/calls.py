"""The calls that are open: their ids, how many may wait, and how their rows are named.

Everything here stands under the engine's lock and never waits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from aioengine.errors import EngineClosedError, EngineDrainingError, EngineError
from aioengine.frontend.outputs import CallOutput
from aioengine.frontend.replay import AttachableOutput
from aioengine.frontend.room import Place, Room

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable, Iterator

    from aioengine.config import QueueConfig
    from aioengine.frontend.outputs import RowStream
    from aioengine.frontend.requests import CallRequest
    from aioengine.frontend.submitter import Ending


MAX_PARTS: Final = 2
"""Numbers behind an id: of the prompt, and of its sample."""

MAX_DIGITS: Final = 10
"""Digits of such a number; no batch has more rows, and Python converts only some thousand digits."""

DRAINING = "the engine is draining and takes no new requests"


class Call:
    """One call of the user while it is open: what it asked for, and how far its rows have been begun.

    Attributes:
        number: counts the calls of the engine, from 1; 0 before it is registered.
        num_started: rows that were begun, in order.
        num_rows_of: rows that the scheduler has, by prompt. num_prompt_tokens: of these prompts, for the bound on
            queued tokens; a prompt of several samples counts once.
        deadlines: absolute times, by the words that name them in a finish reason.
        aborted: positions that were aborted before they were begun.
        ending: what all rows end with that are not begun yet; None while they may begin.
        is_encoding: a part of its prompts is on the tokenizer's thread, or its rows begin in the next turns.
    """

    __slots__ = (
        "aborted", "called_at", "deadlines", "ending", "is_encoding", "num_prompt_tokens", "num_rows_of",
        "num_started", "number", "output", "request", "reserved", "rid", "timer",
    )  # fmt: skip

    def __init__(self, request: CallRequest, called_at: float) -> None:
        self.request = request
        self.rid = request.rid or os.urandom(16).hex()
        self.number = 0
        self.called_at = called_at
        self.deadlines = {which: called_at + seconds for which, seconds in request.timeouts().items()}
        self.output = _output_of(request, self.rid)
        self.num_started = 0
        self.num_prompt_tokens = 0
        self.num_rows_of: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.ending: Ending | None = None
        self.is_encoding = False
        self.reserved: list[str] = []
        self.timer: asyncio.TimerHandle | None = None

    def expired_deadline(self, now: float) -> str | None:
        """Which deadline has passed for a row that was not begun."""
        return next((which for which, deadline in self.deadlines.items() if deadline <= now), None)

    def row_rid(self, position: int) -> str:
        """The id of a row: the call's own, or with the number of its prompt, then of its sample, behind it."""
        request = self.request
        prompt, sample = divmod(position, request.num_samples)
        rid = (
            request.rids[prompt]
            if request.rids is not None
            else f"{self.rid}_{prompt}"
            if request.is_batch
            else self.rid
        )
        return f"{rid}_{sample}" if request.num_samples > 1 else rid

    def names(self) -> dict[str, Name]:
        """The ids that the caller gave, or the one that was drawn; those of its rows are found through these."""
        request, samples = self.request, self.request.num_samples
        of_samples = (1,) if samples > 1 else ()
        of_rows = (samples, *of_samples) if request.is_batch and request.rids is None else of_samples
        found = {self.rid: Name(self, range(request.num_rows), of_rows)}
        for prompt, rid in enumerate(request.rids or ()):
            if rid in found:
                raise ValueError(f"rid {rid!r} stands for two prompts of this batch; give each its own")
            found[rid] = Name(self, range(prompt * samples, (prompt + 1) * samples), of_samples)
        return found


class Name(NamedTuple):
    """What an id means: these rows of this call. ``widths``: the rows that ``id_0``, and then ``id_0_0``, mean."""

    call: Call
    rows: range
    widths: tuple[int, ...]

    def part(self, number: str) -> Name | None:
        """What the id with ``_number`` behind it means."""
        if not self.widths or not number.isdecimal() or len(number) > MAX_DIGITS or str(int(number)) != number:
            return None
        rows = self.rows[int(number) * self.widths[0] :][: self.widths[0]]
        return Name(self.call, rows, self.widths[1:]) if rows else None


class Calls:
    """All open calls. Refuses new ones when the engine cannot take them.

    Attributes:
        num_opened: calls that were ever registered.
        _by_base: of the known ids with numbers behind them, those that an id without these numbers could mean.
    """

    def __init__(self, queue: QueueConfig, *, max_running: int, max_total_tokens: int) -> None:
        self.by_output: dict[CallOutput, Call] = {}
        self.failure: EngineError | None = None
        self.is_draining = False
        self.num_opened = 0
        self._names: dict[str, Name] = {}
        self._by_base: dict[str, set[str]] = {}
        self.room = Room(queue, max_running=max_running, max_total_tokens=max_total_tokens)

    def check(self, caller: Hashable) -> None:
        """Raise EngineError where a call of ``caller`` could not be taken now, whatever it is."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.is_draining:
            raise EngineDrainingError(DRAINING)
        self.room.check(caller)

    def enter_line(self, caller: Hashable, wake: Callable[[], bool], now: float) -> Place:
        """Stand in line for a call; ``wake`` is called, from any thread, when the place is given or will never be.

        Raises:
            EngineError: the engine is dead, closed or draining.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self.is_draining:
            raise EngineDrainingError(DRAINING)
        place = Place(caller, wake)
        self.room.enter_line(place, now)
        return place

    def drain(self) -> None:
        """Take nothing new."""
        self.is_draining = True
        self.room.fail(EngineDrainingError(DRAINING))

    def fail(self, error: EngineError) -> None:
        """Take nothing any more."""
        self.failure = error
        self.room.fail(error)

    def open(self, call: Call, caller: Hashable) -> None:
        """Register a call.

        Raises:
            EngineError: the engine is dead, closed, draining or overloaded.
            ValueError: an id is in use.
        """
        self.check(caller)
        request, names = call.request, call.names()
        if request.rid is not None or request.rids is not None:  # an id that was drawn is no other's
            self._check_free(names)
        num_bytes = request.num_bytes
        call.reserved = [*names]
        for name in names:
            for base in _bases(name):
                self._by_base.setdefault(base, set()).add(name)
        self.room.use_place(caller)
        # From here to the end nothing is called: a signal handler that raises comes before all of it, or after.
        self._names |= names
        self.num_opened += 1
        call.number = self.num_opened
        self.room.num_calls += 1
        self.room.num_bytes += num_bytes
        self.by_output[call.output] = call

    def add_row(self, call: Call, row: RowStream) -> None:
        """The row goes to the scheduler: its prompt counts until all rows of it have ended."""
        prompt = row.position // call.request.num_samples
        num_rows = call.num_rows_of.get(prompt, 0)
        if not num_rows:
            num_tokens = len(row.facts.prompt_token_ids)
            call.num_prompt_tokens += num_tokens
            self.room.num_tokens += num_tokens
        call.num_rows_of[prompt] = num_rows + 1

    def end_row(self, call: Call, row: RowStream, now: float) -> None:
        """The row has ended, and its call goes on."""
        prompt = row.position // call.request.num_samples
        num_rows = call.num_rows_of.pop(prompt, 0) - 1
        if num_rows > 0:
            call.num_rows_of[prompt] = num_rows
        elif num_rows == 0:
            num_tokens = len(row.facts.prompt_token_ids)
            call.num_prompt_tokens -= num_tokens
            self.room.give_back_tokens(num_tokens, now)

    def find(self, rid: str) -> Name | None:
        """The rows that an id means: one that was given or drawn, or one made from it with ``_0``, ``_1`` ..."""
        return _find(self._names, rid)

    def _check_free(self, names: dict[str, Name]) -> None:
        """Neither a new id nor one made from it may mean a live request, and the other way round.

        A request that is over, though the engine's loop has not closed it yet, makes way.
        """
        taken = [(name, found.call) for name in names if (found := self.find(name)) is not None]
        if any(name.widths for name in names.values()):
            made = {name for base in names for name in self._by_base.get(base, ()) if name in self._names}
            taken += [(name, self._names[name].call) for name in made if _find(names, name) is not None]
        for name, call in taken:
            if not call.output.is_over or call.request.resume_ttl_s is not None:
                raise ValueError(
                    f"rid {name!r} is in use by a live request, or one that can be attached to; choose another, or "
                    "wait for its end"
                )
            self.free_names(call)

    def close(self, call: Call, now: float) -> None:
        """The call is over; its ids are free again, unless it can be attached to."""
        if self.by_output.pop(call.output, None) is None:
            return
        if call.request.resume_ttl_s is None:
            self.free_names(call)
        self.room.give_back(call.num_prompt_tokens, call.request.num_bytes, now)
        if call.timer is not None:
            call.timer.cancel()

    def free_names(self, call: Call) -> None:
        """Its ids mean nothing any more."""
        for name in call.reserved:
            if (found := self._names.get(name)) is not None and found.call is not call:
                continue
            self._names.pop(name, None)
            for base in _bases(name):
                self._forget_base(base, name)
        call.reserved = []

    def _forget_base(self, base: str, name: str) -> None:
        made = self._by_base.get(base, set())
        made.discard(name)
        if not made:
            self._by_base.pop(base, None)


def _output_of(request: CallRequest, rid: str) -> CallOutput:
    if request.resume_ttl_s is not None:
        return AttachableOutput(rid)
    return CallOutput(
        rid,
        request.num_rows,
        is_stream=request.is_stream,
        is_batch=request.gives_batch,
        returns_exceptions=request.returns_exceptions and request.gives_batch,
    )


def _find(names: dict[str, Name], rid: str) -> Name | None:
    """The rows of an id that is known, or that has one or two numbers behind a known one; any string is allowed."""
    found = names.get(rid)
    numbers: list[str] = []
    while found is None and len(numbers) < MAX_PARTS:
        rid, separator, number = rid.rpartition("_")
        if not separator:
            return None
        numbers.append(number)
        found = names.get(rid)
    while found is not None and numbers:
        found = found.part(numbers.pop())
    return found


def _bases(rid: str) -> Iterator[str]:
    """The ids that could mean this one, with one or two numbers behind them."""
    for _ in range(MAX_PARTS):
        rid, separator, number = rid.rpartition("_")
        if not separator or not number.isdecimal():
            return
        yield rid


def not_started() -> EngineClosedError:
    return EngineClosedError("the engine was not started: use `async with AsyncEngine(...)`, or `await engine.start()`")


def forked(owner: int) -> EngineClosedError:
    return EngineClosedError(
        f"this engine belongs to process {owner}, and this process ({os.getpid()}) is a fork of it; "
        "make an engine, or start an AsyncEngine, in the process that uses it"
    )


def closed() -> EngineClosedError:
    return EngineClosedError(
        "the engine was shut down; an AsyncEngine can be started again (`await engine.start()`), an Engine is made anew"
    )
