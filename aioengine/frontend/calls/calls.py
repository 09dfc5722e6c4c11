"""The calls that are open, their ids, and the ids of their rows.

Everything here is done under the engine's lock, from any thread, and never waits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from aioengine.frontend.calls.outputs import CallOutput
from aioengine.frontend.intake.pooling import PooledOutput
from aioengine.frontend.sessions.replay import AttachableOutput, SessionOutput

if TYPE_CHECKING:
    import asyncio

    from aioengine.api.answers import RowError
    from aioengine.frontend.calls.outputs import RowStream
    from aioengine.frontend.calls.overload import Reservation
    from aioengine.frontend.intake.requests import CallRequest
    from aioengine.protocol.messages import FinishCode


MAX_PARTS: Final = 2
"""Numbers behind an id: of the prompt, and of its sample."""

MAX_DIGITS: Final = 10
"""Digits of such a number; no batch has more rows, and Python converts only some thousand digits."""

MAX_NAMES_FREED: Final = 1024
"""Ids that are freed in one turn of the loop."""


class Ending(NamedTuple):
    """How the rows of a call end that were not started when it was ended."""

    code: FinishCode
    matched: str | None = None
    error: RowError | None = None


class Call:
    """One call of the user while it is open: its request, and how many of its rows were started.

    Attributes:
        number: counts the calls of the engine, from 1; 0 before it is registered.
        num_started: rows that were started, in order.
        reservation: its part of the limits.
        deadlines: absolute times, by the words that name them in a finish reason.
        aborted: positions that were aborted before they were started.
        ending: how all rows end that are not started yet; None while they may start.
        is_encoding: some of its prompts are on the tokenizer's thread, or their rows start in the next turns.
    """

    __slots__ = (
        "aborted", "called_at", "deadlines", "ending", "is_encoding", "names", "num_started", "number",
        "output", "request", "reservation", "rid", "timer",
    )  # fmt: skip

    def __init__(self, request: CallRequest, called_at: float, reservation: Reservation) -> None:
        self.request = request
        self.rid = request.rid or os.urandom(16).hex()
        self.number = 0
        self.called_at = called_at
        self.deadlines = {which: called_at + seconds for which, seconds in request.timeouts.items()}
        self.output = _output_of(request, self.rid)
        self.num_started = 0
        self.reservation = reservation
        self.aborted: set[int] = set()
        self.ending: Ending | None = None
        self.is_encoding = False
        self.names: list[str] = []
        self.timer: asyncio.TimerHandle | None = None

    def expired_deadline(self, now: float) -> str | None:
        """Which deadline has passed for a row that was not started."""
        return next((which for which, deadline in self.deadlines.items() if deadline <= now), None)

    def row_rid(self, position: int) -> str:
        """The id of a row: the call's own, or with the number of its prompt, then of its sample, behind it."""
        request, rid = self.request, self.rid
        prompt, sample = divmod(position, request.num_samples)
        if request.is_batch:
            own = "" if request.rids is None else request.rids[prompt]
            rid = str(own) or f"{rid}_{prompt}"
        return f"{rid}_{sample}" if request.num_samples > 1 else rid

    def own_name(self) -> Name:
        """The rows that the id of the call means."""
        request, widths = self.request, self._sample_widths
        if request.is_batch and request.rids is None:
            widths = (request.num_samples, *widths)
        return Name(self, range(request.num_rows), widths)

    def prompt_name(self, prompt: int) -> Name:
        """The rows that the id of a prompt means, if the caller passed a list of ids."""
        samples = self.request.num_samples
        return Name(self, range(prompt * samples, (prompt + 1) * samples), self._sample_widths)

    @property
    def _sample_widths(self) -> tuple[int, ...]:
        return (1,) if self.request.num_samples > 1 else ()


class Name(NamedTuple):
    """The rows of a call that an id means. ``widths``: how many rows ``id_0``, and then ``id_0_0``, mean."""

    call: Call
    rows: range
    widths: tuple[int, ...]

    def part(self, number: str) -> Name | None:
        """The rows that the id with ``_number`` behind it means."""
        if not self.widths or not number.isdecimal() or len(number) > MAX_DIGITS or str(int(number)) != number:
            return None
        rows = self.rows[int(number) * self.widths[0] :][: self.widths[0]]
        return Name(self.call, rows, self.widths[1:]) if rows else None


class Calls:
    """All open calls, and what ids mean. Under the engine's lock.

    Attributes:
        rows: rows that the scheduler has, by uid: submitted, and without an end here.
        num_opened: calls that were ever registered.
        _by_base: of the known ids with numbers behind them, those that an id without these numbers could mean.
    """

    def __init__(self) -> None:
        self.by_output: dict[CallOutput, Call] = {}
        self.rows: dict[int, RowStream] = {}
        self.num_opened = 0
        self._names: dict[str, Name] = {}
        self._by_base: dict[str, set[str]] = {}

    def open(self, call: Call) -> None:
        """Register a call.

        Raises:
            ValueError: an id is in use.
        """
        names = self._add_names(call, 0)
        # From here to the end nothing is called: a signal handler that raises comes before all of it, or after.
        self._names |= names
        self.num_opened += 1
        call.number = self.num_opened
        self.by_output[call.output] = call

    def add_names(self, call: Call, first: int) -> None:
        """Register the ids of the prompts from ``first`` on that have been checked meanwhile.

        Raises:
            ValueError: an id is in use.
        """
        self._names |= self._add_names(call, first)

    def _add_names(self, call: Call, first: int) -> dict[str, Name]:
        """Register the ids in all indexes except ``_names``, and return their entries for ``_names``.

        If rows fail alone, a row whose id is in use gets its error in its place.
        """
        request = call.request
        names = {call.rid: call.own_name()} if first == 0 else {}
        if request.rid is not None:  # a drawn id is always free
            self._check_free(names, call)
        rids = request.rids or []
        for prompt in range(first, min(len(request.prompts), len(rids))):
            rid, name = rids[prompt], call.prompt_name(prompt)
            try:
                if rid in names:
                    raise _given_twice(rid)
                if rid:
                    self._check_free({rid: name}, call)
                    names[rid] = name
            except ValueError as error:
                rids[prompt] = ""
                request.fail_row(prompt, error)
        call.names += names
        for rid in names:
            for base in _bases(rid):
                self._by_base.setdefault(base, set()).add(rid)
        return names

    def find(self, rid: str) -> Name | None:
        """The rows that an id means: one that was given or drawn, or one made from it with ``_0``, ``_1`` ..."""
        return _find(self._names, rid)

    def _check_free(self, names: dict[str, Name], asking: Call) -> None:
        """Neither a new id nor one made from it may mean a live request, and the other way round.

        A request that is over, though the engine's loop has not closed it yet, makes way.
        """
        taken = [(name, found.call) for name in names if (found := self.find(name)) is not None]
        if any(name.widths for name in names.values()):
            made = {name for base in names for name in self._by_base.get(base, ()) if name in self._names}
            taken += [(name, self._names[name].call) for name in made if _find(names, name) is not None]
        for name, call in taken:
            if call is asking:
                raise _given_twice(name)
            if not call.output.is_over or call.request.resume_ttl_s is not None:
                raise ValueError(
                    f"rid {name!r} is in use by a live request, or one that can be attached to; choose another, or "
                    "wait for its end"
                )
            self._free(name, call)

    def close(self, call: Call) -> bool:
        """The call is over; its ids are free again, unless it can be attached to. False: ``free_names`` is to go on."""
        if self.by_output.pop(call.output, None) is not None and call.timer is not None:
            call.timer.cancel()
        return call.request.resume_ttl_s is not None or self.free_names(call)

    def free_names(self, call: Call) -> bool:
        """Free at most ``MAX_NAMES_FREED`` of its ids. Whether all are free."""
        for name in call.names[-MAX_NAMES_FREED:]:
            self._free(name, call)
        del call.names[-MAX_NAMES_FREED:]
        return not call.names

    def _free(self, name: str, call: Call) -> None:
        if (found := self._names.get(name)) is not None and found.call is not call:
            return
        self._names.pop(name, None)
        for base in _bases(name):
            self._forget_base(base, name)

    def _forget_base(self, base: str, name: str) -> None:
        made = self._by_base.get(base, set())
        made.discard(name)
        if not made:
            self._by_base.pop(base, None)


def _output_of(request: CallRequest, rid: str) -> CallOutput:
    if request.resume_ttl_s is not None:
        return AttachableOutput(rid)
    if (pooled := request.given.pooled) is not None:
        alone = request.returns_exceptions and request.gives_batch
        return PooledOutput(rid, request.num_rows, pooled, is_batch=request.gives_batch, returns_exceptions=alone)
    output = CallOutput if request.sessions is None else SessionOutput
    return output(
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


def _bases(rid: str) -> list[str]:
    """The ids that could mean this one, with one or two numbers behind them."""
    found: list[str] = []
    for _ in range(MAX_PARTS):
        rid, separator, number = rid.rpartition("_")
        if not separator or not number.isdecimal():
            break
        found.append(rid)
    return found


def _given_twice(rid: str) -> ValueError:
    return ValueError(f"rid {rid!r} stands for two prompts of this batch; give each its own")
