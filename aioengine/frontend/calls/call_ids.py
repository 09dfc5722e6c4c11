"""CallIds: the ids of calls and their rows. Under the engine's lock, from any thread; never waits."""

from __future__ import annotations

from typing import Final

from aioengine.frontend.calls.call import Call

MAX_PARTS: Final = 2
"""Numbers after an id: of the prompt, and of its sample."""

MAX_DIGITS: Final = 10
"""Digits of such a number. No batch has more rows, and Python converts only some thousand digits."""

MAX_IDS_FREED: Final = 1024
"""Maximum number of ids that are freed in one iteration of the loop."""

WHOLE: Final = -1
"""In place of a prompt: the id means all rows of the call."""


class CallIds:
    """The known ids, and the rows that they mean. Under the engine's lock.

    Numbers may be appended to an id. With ``rid="x"``, 3 prompts and ``n=2``, ``x`` means rows 0 to 5 of the call,
    ``x_1`` means rows 2 and 3 (prompt 1), and ``x_1_0`` means row 2. Only ``x`` is a known id. If there is another
    known id ``x_1``, it has its own meaning.

    Attributes:
        _owners: known id -> its call and the index of its prompt, or ``WHOLE``.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[Call, int]] = {}

    def add(self, call: Call) -> None:
        """Register the ids of a new call, or of the prompts that have been checked since the last time.

        These prompts may then start (``CallRequest.num_registered``). If rows fail alone, only a row whose id is in use
        fails.

        Raises:
            ValueError: an id is in use.
        """
        request, first = call.request, call.request.num_registered
        owners: dict[str, tuple[Call, int]] = {}
        rids = request.rids or []
        if first == 0:
            if request.rid is not None:  # a random id is always free
                self._check_free(call, call.rid)
            owners[call.rid] = call, WHOLE
        for prompt_index in range(first, min(len(request.prompts), len(rids))):
            rid = rids[prompt_index]
            try:
                if rid in owners:
                    raise _repeated_id(rid)
                if rid:
                    self._check_free(call, rid)
                    owners[rid] = call, prompt_index
            except ValueError as error:
                rids[prompt_index] = ""
                request.fail_prompt(prompt_index, error)
        call.ids += owners
        self._owners |= owners
        request.num_registered = len(request.prompts)

    def find(self, rid: str) -> tuple[Call, range] | None:
        """Return the call and the rows of a known id, or of one with ``_0``, ``_1`` ... appended."""
        numbers: list[str] = []
        while (owner := self._owners.get(rid)) is None:
            rid, separator, number = rid.rpartition("_")
            if not separator or len(numbers) == MAX_PARTS:
                return None
            numbers.append(number)
        rows, widths = _rows(*owner)
        for number in reversed(numbers):
            if not widths or not number.isdecimal() or len(number) > MAX_DIGITS or str(int(number)) != number:
                return None
            rows, widths = rows[int(number) * widths[0] :][: widths[0]], widths[1:]
            if not rows:
                return None
        return owner[0], rows

    def _check_free(self, call: Call, rid: str) -> None:
        """Check a new id. Free the known id of another call that is over.

        Raises:
            ValueError: it is in use, or is a known id with numbers appended.
        """
        if (known := self.find(rid)) is None:
            return
        other = known[0]
        if other is call:
            raise _repeated_id(rid)
        if not other.is_over or other.is_attachable:
            raise ValueError(f"rid {rid!r} is in use by a request that runs or can be attached to; choose another")
        self._free(rid, other)

    def free(self, call: Call) -> bool:
        """Free at most ``MAX_IDS_FREED`` ids of a call. Returns whether all are free."""
        for rid in call.ids[-MAX_IDS_FREED:]:
            self._free(rid, call)
        del call.ids[-MAX_IDS_FREED:]
        return not call.ids

    def _free(self, rid: str, call: Call) -> None:
        if (owner := self._owners.get(rid)) is not None and owner[0] is call:
            del self._owners[rid]


def _rows(call: Call, prompt_index: int) -> tuple[range, tuple[int, ...]]:
    """Return the rows of an id, and widths: how many rows the id means with one number appended, then with two."""
    request = call.request
    samples = request.num_samples
    widths = (1,) if samples > 1 else ()
    if prompt_index != WHOLE:
        return range(prompt_index * samples, (prompt_index + 1) * samples), widths
    if request.is_batch and request.rids is None:
        widths = (samples, *widths)
    return range(request.num_rows), widths


def _repeated_id(rid: str) -> ValueError:
    return ValueError(f"rid {rid!r} is the id of two prompts of this batch; each prompt needs its own")
