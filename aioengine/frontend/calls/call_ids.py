"""CallIds: the ids of calls and their rows. Under the engine's lock, from any thread; never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aioengine.frontend.calls.call import Call


MAX_PARTS: Final = 2
"""Numbers after an id: of the prompt, and of its sample."""

MAX_DIGITS: Final = 10
"""Digits of such a number. No batch has more rows, and Python converts only some thousand digits."""

MAX_NAMES_FREED: Final = 1024
"""Ids that are freed in one turn of the loop."""

WHOLE: Final = -1
"""In place of a prompt: the id means all rows of the call."""


class CallIds:
    """The known ids, and the rows that they mean. Under the engine's lock.

    Attributes:
        _names: the call of each id, and the prompt that it means, or ``WHOLE``.
        _by_base: for a possible id, the known ids that consist of it and appended numbers.
    """

    def __init__(self) -> None:
        self._names: dict[str, tuple[Call, int]] = {}
        self._by_base: dict[str, set[str]] = {}

    def add(self, call: Call) -> None:
        """Register the ids of a new call, or of the prompts that have been checked since the last time.

        If rows fail alone, a row whose id is in use gets its error in its place.

        Raises:
            ValueError: an id is in use.
        """
        request, first = call.request, call.request.num_known
        names = {call.rid: (call, WHOLE)} if first == 0 else {}
        rids = request.rids or []
        if request.rid is not None:  # a random id is always free
            self._check_free(call, names)
        for prompt in range(first, min(len(request.prompts), len(rids))):
            rid = rids[prompt]
            try:
                if rid in names:
                    raise _repeated_id(rid)
                if rid:
                    self._check_free(call, {rid: (call, prompt)})
                    names[rid] = call, prompt
            except ValueError as error:
                rids[prompt] = ""
                request.fail_prompt(prompt, error)
        call.names += names
        if request.rid is not None or rids:  # a random id has no number at its end
            for rid in names:
                for base in _bases(rid):
                    self._by_base.setdefault(base, set()).add(rid)
        self._names |= names
        request.num_known = len(request.prompts)

    def find(self, rid: str) -> tuple[Call, range] | None:
        """Return the call and the rows of an id, or of an id with ``_0``, ``_1`` ... appended."""
        return _find(self._names, rid)

    def _check_free(self, call: Call, names: dict[str, tuple[Call, int]]) -> None:
        """Check that no id is in use: neither ``names``, nor one of them with appended numbers, and vice versa.

        A request that is over gives up its id, even if the engine's loop has not closed it yet.
        """
        taken = [(name, rows[0]) for name in names if (rows := self.find(name)) is not None]
        if any(_rows(*entry)[1] for entry in names.values()):
            longer = {name for base in names for name in self._by_base.get(base, ()) if name in self._names}
            taken += [(name, self._names[name][0]) for name in longer if _find(names, name) is not None]
        for name, owner in taken:
            if owner is call:
                raise _repeated_id(name)
            if not owner.is_over or owner.is_attachable:
                raise ValueError(
                    f"rid {name!r} is in use by a live request, or one that can be attached to; choose another, or "
                    "wait for its end"
                )
            self._free(name, owner)

    def free(self, call: Call) -> bool:
        """Free at most ``MAX_NAMES_FREED`` of its ids. Returns whether all are free."""
        for name in call.names[-MAX_NAMES_FREED:]:
            self._free(name, call)
        del call.names[-MAX_NAMES_FREED:]
        return not call.names

    def _free(self, name: str, call: Call) -> None:
        if (entry := self._names.get(name)) is not None and entry[0] is not call:
            return
        self._names.pop(name, None)
        for base in _bases(name):
            longer = self._by_base.get(base, set())
            longer.discard(name)
            if not longer:
                self._by_base.pop(base, None)


def _rows(call: Call, prompt: int) -> tuple[range, tuple[int, ...]]:
    """Return the rows of an id, and the numbers of rows of this id with one and with two numbers appended."""
    request = call.request
    samples = request.num_samples
    widths = (1,) if samples > 1 else ()
    if prompt != WHOLE:
        return range(prompt * samples, (prompt + 1) * samples), widths
    return range(request.num_rows), (samples, *widths) if request.is_batch and request.rids is None else widths


def _find(names: dict[str, tuple[Call, int]], rid: str) -> tuple[Call, range] | None:
    """Return the rows of a known id, or of a known id with one or two numbers appended. Any string is allowed."""
    numbers: list[str] = []
    while (entry := names.get(rid)) is None:
        rid, separator, number = rid.rpartition("_")
        if not separator or len(numbers) == MAX_PARTS:
            return None
        numbers.append(number)
    rows, widths = _rows(*entry)
    for number in reversed(numbers):
        if not widths or not number.isdecimal() or len(number) > MAX_DIGITS or str(int(number)) != number:
            return None
        rows, widths = rows[int(number) * widths[0] :][: widths[0]], widths[1:]
        if not rows:
            return None
    return entry[0], rows


def _bases(rid: str) -> list[str]:
    """Return the ids that could mean this one, with one or two numbers appended."""
    bases: list[str] = []
    for _ in range(MAX_PARTS):
        rid, separator, number = rid.rpartition("_")
        if not separator or not number.isdecimal():
            break
        bases.append(rid)
    return bases


def _repeated_id(rid: str) -> ValueError:
    return ValueError(f"rid {rid!r} is the id of two prompts of this batch; each prompt needs its own")
