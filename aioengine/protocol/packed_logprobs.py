"""Logprobs on their way from the runner to the caller: what a request asks for, and the bytes that answer it.

They travel as ``Extra``s. The runner writes the numbers of each position, little-endian, one position behind the other:

    float32: the logprobs of the token itself, of the likeliest tokens (best first), of the tokens asked for
    int32:   the ids of the token itself and of the likeliest tokens

Where the request wants texts, the detokenizer appends those of all these ids, then of the tokens asked for, as one list
in msgpack. No number becomes a Python object before ``LogprobReader`` reads it in the process of the caller.
"""

from __future__ import annotations

from itertools import repeat
from struct import Struct as Format
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from msgspec import Struct, msgpack

from aioengine.protocol.columns import Extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OUTPUT_LOGPROBS: Final = "logprobs"
"""``Extra.kind`` of an output token."""

PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""``Extra.kind`` of the prompt from ``LogprobRules.start`` on, in blocks (``prompt_extras``). ``Extra.index`` counts
the positions from there. Of position 0 of the prompt only the id has a meaning.
"""

NEXT_LOGPROBS: Final = "next_logprobs"
"""``Extra.kind`` of the position behind the prompt of a SCORE request. It has no token: its first logprob and id mean
nothing.
"""

BLOCK_BYTES: Final = 64 * 1024
"""Of the logprobs of a prompt, at least one position: so much is read at once, some milliseconds."""

Entry = tuple[float | None, int, str | None]
"""Logprob, token id, text."""

_NO_TEXTS: Final = repeat(None)

_texts = msgpack.Decoder(list[str])


class LogprobRules(Struct, frozen=True, array_like=True, gc=False):
    """Which logprobs a request gets for each of its output tokens.

    start: the prompt positions from this one on get them too; -1: none. num_top: how many of the likeliest tokens.
    token_ids: further tokens. with_text: with the text of each token.
    """

    start: int = -1
    num_top: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False

    @property
    def num_values(self) -> int:
        """Logprobs of a position."""
        return 1 + self.num_top + len(self.token_ids)

    @property
    def position_bytes(self) -> int:
        """Bytes of a position, without texts."""
        return 4 * (self.num_values + 1 + self.num_top)

    @property
    def positions_in_block(self) -> int:
        """Positions of a prompt that come in one extra."""
        return max(1, BLOCK_BYTES // self.position_bytes)

    def num_prompt_positions(self, num_prompt: int) -> int:
        """How many positions of a prompt get logprobs."""
        return 0 if self.start < 0 else num_prompt - self.start


_Lists = tuple[list[Entry], list[list[Entry] | None], list[list[Entry] | None]]
"""Entries by position: of the token itself, of the likeliest tokens, of the tokens asked for."""

_LENGTH: Final = "output_token_logprobs_length"
_NAMES: Final = {
    side: (f"{side}_token_logprobs", f"{side}_top_logprobs", f"{side}_token_ids_logprobs")
    for side in ("input", "output")
}
"""In ``meta_info``, of ``_Lists``."""


class LogprobReader:
    """The logprobs of one request, by its ``rules``: read as they come, and given out as the lists of ``meta_info``.

    Attributes:
        num_entries: read so far, of every kind.
    """

    __slots__ = ("_first", "_format", "_is_next", "_num_positions", "_output", "_prompt", "num_entries", "rules")

    kinds: ClassVar[frozenset[str]] = frozenset((OUTPUT_LOGPROBS, PROMPT_LOGPROBS, NEXT_LOGPROBS))

    def __init__(self, rules: LogprobRules, num_prompt: int) -> None:
        self.rules = rules
        self.num_entries = 0
        self._format = Format(f"<{rules.num_values}f{1 + rules.num_top}i")
        self._num_positions = rules.num_prompt_positions(num_prompt)
        self._prompt: _Lists = [], [], []
        self._output: _Lists = [], [], []
        self._first = 0  # output token of the first entry in ``_output``
        self._is_next = False

    def read(self, extra: Extra) -> None:
        """Read those of an extra, in place of what was read before of its positions."""
        data, count, is_prompt = extra.data, 1, extra.kind == PROMPT_LOGPROBS
        lists, place = self._output, extra.index - self._first
        if is_prompt:
            lists, place = self._prompt, extra.index
            count = min(self.rules.positions_in_block, self._num_positions - place)
        elif extra.kind == NEXT_LOGPROBS:
            self._is_next, place = True, 0
        elif place < 0:
            return  # it was given out
        new = self._entries(data, count)
        if extra.kind == NEXT_LOGPROBS:
            new[0].clear()
        if is_prompt and place == self.rules.start == 0:
            own, top, asked = new
            own[0] = (None, *own[0][1:])
            top[:1] = asked[:1] = [None]
        self.num_entries += count * self.rules.num_values
        for kept, entries in cast("Iterable[tuple[list[Any], list[Any]]]", zip(lists, new, strict=True)):
            if place > len(kept) and entries:  # what is missing follows
                kept += [entries[0]] * (place - len(kept))
            kept[place : place + len(entries)] = entries

    def lists(self, start: int, end: int, *, keeps: bool) -> dict[str, object]:
        """Those of the output tokens from ``start`` to ``end``, and of the prompt with the first of them.

        ``keeps``: they may be asked for again.
        """
        first, end = self._first, 1 if self._is_next else end
        taken = slice(start - first, end - first)
        own, top, asked = self._output
        named = _named("output", (own[taken], top[taken], asked[taken]), self.rules)
        if start == 0:
            own, top, asked = self._prompt
            named |= _named("input", (own.copy(), top.copy(), asked.copy()), self.rules)
        if not keeps:
            self._first = end
            for kept in self._output:
                del kept[: end - first]
            for kept in self._prompt:
                kept.clear()
        return named

    def _entries(self, data: bytes, count: int) -> _Lists:
        """Those of ``count`` positions."""
        num_top, num_values, asked_ids = self.rules.num_top, self.rules.num_values, self.rules.token_ids
        size, unpack = self._format.size, self._format.unpack_from
        own, top, asked = lists = cast("_Lists", ([], [], []))
        texts = _texts.decode(memoryview(data)[count * size :]) if self.rules.with_text else []
        next_texts = iter(texts) if texts else _NO_TEXTS
        asked_texts = texts[len(texts) - len(asked_ids) :] or _NO_TEXTS
        for offset in range(0, count * size, size):
            values = unpack(data, offset)
            own.append((values[0], values[num_values], next(next_texts)))
            if num_top:
                best = zip(values[1 : 1 + num_top], values[num_values + 1 :], next_texts)  # noqa: B905  # a keyword is slow
                top.append(list(best))
            if asked_ids:
                asked.append(list(zip(values[1 + num_top : num_values], asked_ids, asked_texts, strict=False)))
        return lists


def _named(side: str, lists: _Lists, rules: LogprobRules) -> dict[str, object]:
    own, top, asked = _NAMES[side]
    named: dict[str, object] = {own: lists[0]}
    if side == "output":
        named[_LENGTH] = len(lists[0])
    if rules.num_top:
        named[top] = lists[1]
    if rules.token_ids:
        named[asked] = lists[2]
    return named


def prompt_extras(uid: int, data: bytes, rules: LogprobRules) -> list[Extra]:
    """The logprobs of all positions of a prompt, packed, as extras of a bounded number of positions each."""
    count, size = rules.positions_in_block, rules.positions_in_block * rules.position_bytes
    blocks = (data[start : start + size] for start in range(0, len(data), size))
    return [Extra(uid, place * count, PROMPT_LOGPROBS, block) for place, block in enumerate(blocks)]


def with_texts(extra: Extra, rules: LogprobRules, text_of: Callable[[int], str]) -> Extra:
    """The extra with the texts of its tokens appended; one of another kind as it is."""
    if extra.kind not in LogprobReader.kinds:
        return extra
    id_format = Format(f"<{4 * rules.num_values}x{1 + rules.num_top}i")
    ids = [token_id for position in id_format.iter_unpack(extra.data) for token_id in position]
    texts = [text_of(token_id) for token_id in (*ids, *rules.token_ids)]
    return Extra(extra.uid, extra.index, extra.kind, extra.data + msgpack.encode(texts))
