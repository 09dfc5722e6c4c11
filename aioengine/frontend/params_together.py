"""The bound on lists of sampling parameters: what those of one call may have to check together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from aioengine import checks
from aioengine import parameter_table as table
from aioengine.params import CONSTRAINTS, SamplingParams, num_token_ids

MAX_ENTRIES_OF_CALL: Final = 65_536
"""Token ids and biases in all parameters of a call, which are checked together. A bad word counts as
``ENTRIES_PER_WORD``: it is tokenized too.
"""
ENTRIES_PER_WORD: Final = 64

MAX_CONSTRAINT_BYTES: Final = 262_144
"""Of one constraint; larger ones are refused, each for itself."""

MAX_CONSTRAINT_BYTES_OF_CALL: Final = 524_288
"""Of all different parameters of a call: schemas and patterns take up to 2 us a byte to check."""

MAX_COST_AT_ONCE: Final = 32_768
"""Microseconds, about: behind parameters that take these, none are checked in the same turn of the loop."""
COST_PER_ENTRY: Final = 2
COST_PER_CUSTOM_PARAMS: Final = 512

_MAX_ENTRIES: Final = {
    "stop_token_ids": table.MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": table.MAX_ALLOWED_TOKEN_IDS,
    "logit_bias": table.MAX_BIASES,
    "bad_words": table.MAX_BAD_WORDS,
}
_COSTLY: Final = frozenset((*_MAX_ENTRIES, "stop_regex"))
"""Parameters whose checks may take long."""


class ParamsTogether:
    """The parameters of one call: it is refused where they take too long to check together."""

    def __init__(self) -> None:
        self._num_ids = 0
        self._seen: dict[int, object] = {}
        self._patterns: dict[str, None] = {}
        self._num_constraint_bytes = 0
        self._cost = 0

    def add(self, entries: Sequence[object]) -> int:
        """Count some more, and return of how many: the others would take too long to check with these. An object that
        several rows share counts once.

        Raises:
            ValueError: they have too many stop token ids, biases or patterns, or too much of constraints.
        """
        num_patterns, num_added = len(self._patterns), 0
        most = self._cost + MAX_COST_AT_ONCE
        for entry in entries:
            if id(entry) not in self._seen:
                if self._cost > most:
                    break
                self._seen[id(entry)] = entry
                self._add(entry)
            num_added += 1
        if self._num_ids > MAX_ENTRIES_OF_CALL:
            raise ValueError(
                f"the sampling_params of one call have {self._num_ids} stop_token_ids, allowed_token_ids, bad_words "
                f"(each counts as {ENTRIES_PER_WORD}) and logit_bias entries together; "
                f"at most {MAX_ENTRIES_OF_CALL} are allowed; give rows that share them the same object, or make "
                "several calls"
            )
        if self._num_constraint_bytes > MAX_CONSTRAINT_BYTES_OF_CALL:
            raise ValueError(
                f"the constraints in the sampling_params of one call have {self._num_constraint_bytes:,} bytes; "
                f"at most {MAX_CONSTRAINT_BYTES_OF_CALL:,} are allowed; give rows that share them the same object, or "
                "make several calls"
            )
        if len(self._patterns) > num_patterns:
            from aioengine.patterns import check_patterns_of_call  # slow to import, and most programs give no pattern

            check_patterns_of_call(self._patterns)
        return num_added

    def _add(self, entry: object) -> None:
        if isinstance(entry, SamplingParams):  # whose patterns were checked when it was made
            self._num_ids += num_token_ids(entry) + ENTRIES_PER_WORD * len(entry.bad_words or ())
            return
        if isinstance(entry, Mapping) and not CONSTRAINTS.isdisjoint(cast("Mapping[str, object]", entry)):
            for name, value in cast("Mapping[str, object]", entry).items():
                size = _size(value) if name in CONSTRAINTS else 0
                self._num_constraint_bytes += size if size <= MAX_CONSTRAINT_BYTES else 0
                self._cost += size
        if isinstance(entry, Mapping) and "custom_params" in entry:
            self._cost += COST_PER_CUSTOM_PARAMS
        if isinstance(entry, Mapping) and not _COSTLY.isdisjoint(given := cast("Mapping[str, object]", entry)):
            sizes = {name: _num_entries(name, given.get(name)) for name in _MAX_ENTRIES}
            num_ids = sum(sizes.values()) + (ENTRIES_PER_WORD - 1) * sizes["bad_words"]
            self._num_ids += num_ids
            self._cost += COST_PER_ENTRY * num_ids
            regex = checks.plain(given.get("stop_regex"))
            several = cast("Sequence[object]", regex) if isinstance(regex, list | tuple) else [regex]
            if len(several) <= table.MAX_STOPS:
                self._patterns.update((each, None) for each in several if isinstance(each, str))


def _size(value: object) -> int:
    """About how many bytes of a constraint are to be checked; 0 for a class. One more than there may be where it is too
    large, which takes as long to see.
    """
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, list | tuple):
        size = sum(len(each) for each in cast("Sequence[object]", value) if isinstance(each, str))
    else:
        size = checks.json_size(value, MAX_CONSTRAINT_BYTES) if isinstance(value, dict) else 0
    return min(size, MAX_CONSTRAINT_BYTES + 1)


def _num_entries(name: str, value: object) -> int:
    """How many are to be checked: none where there are too many, or it is no list, which is refused for that alone."""
    size = 0 if isinstance(value, str | bytes) else checks.num_items(value)
    return size if size <= _MAX_ENTRIES[name] else 0
