"""The logprob options of a request, and the packed logprobs from the runner to the caller.

Logprobs are sent as ``Extra``s. The runner writes the numbers of each position, little-endian, position by position:

    float32: the logprobs of the token itself, of the top tokens (best first), and of the requested tokens
    int32:   the ids of the token itself and of the top tokens

If the request wants texts, the detokenizer appends the texts of all these ids, then of the requested tokens, as one
msgpack list. ``LogprobDecoder`` unpacks the values in the process of the caller. If a position has more than
``MAX_PLAIN`` entries, they are unpacked when the caller reads the position (``Positions``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import islice, repeat
from struct import Struct as Format
from typing import Any, ClassVar, Final, SupportsIndex, cast

from msgspec import Struct, msgpack

from aioengine.protocol.columns import BLOCK_BYTES, Extra

OUTPUT_LOGPROBS: Final = "logprobs"
"""``Extra.kind`` of an output token."""

PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""``Extra.kind`` of the prompt from ``LogprobRules.start`` on, in blocks (``block_extras``). ``Extra.index`` counts
positions from there. Position 0 of the prompt has an id, but no logprobs.
"""

NEXT_LOGPROBS: Final = "next_logprobs"
"""``Extra.kind`` of the position after the prompt of a SCORE request. It has no token, so ignore its first logprob and
id.
"""

Entry = tuple[float | None, int, str | None]
"""Logprob, token id, text."""

MAX_PLAIN: Final = 20
"""If a position has more entries, without the entry of its own token, they stay packed until the position is read."""

_FLOAT: Final = Format("<f")
_ID: Final = Format("<i")
_NO_TEXTS: Final = repeat(None)

_texts = msgpack.Decoder(list[str])


class LogprobRules(Struct, frozen=True, array_like=True, gc=False):
    """The logprobs that a request wants for each output token.

    start: first prompt position with logprobs; -1: the prompt has none. num_top: number of top tokens.
    token_ids: further tokens. with_text: add the text of each token.
    """

    start: int = -1
    num_top: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False

    @property
    def num_values(self) -> int:
        """Number of logprobs of a position."""
        return 1 + self.num_top + len(self.token_ids)

    @property
    def is_deep(self) -> bool:
        """Whether entries stay packed until the caller reads them."""
        return self.num_values > 1 + MAX_PLAIN

    @property
    def position_bytes(self) -> int:
        """Number of bytes of a position, without texts."""
        return 4 * (self.num_values + 1 + self.num_top)

    def num_prompt_positions(self, num_prompt: int) -> int:
        """Return the number of prompt positions with logprobs."""
        return 0 if self.start < 0 else num_prompt - self.start


class PackedEntries(Enum):
    """The packed entries of one position in a ``Positions`` list. Its ``value`` is the list of entries.

    It is an enum member because msgspec, orjson and pydantic read the memory of a list, without calling its methods,
    and write the value of an enum member.
    """

    unpack: Callable[[], list[Entry]]

    def __getattr__(self, name: str) -> list[Entry]:
        if name != "_value_":
            raise AttributeError(name)
        return self.unpack()


def _packed(unpack: Callable[[], list[Entry]]) -> PackedEntries:
    packed = object.__new__(PackedEntries)
    packed.unpack = unpack
    return packed


class Positions(list[Any]):
    """A list with the entries of each position. The entries of a position are unpacked when they are first read.

    It is equal to a plain list, and is encoded, pickled and copied as a plain list.
    """

    __slots__ = ()

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if isinstance(key, slice):
            return [self[place] for place in range(*key.indices(len(self)))]
        entries = super().__getitem__(key)
        if type(entries) is PackedEntries:
            entries = entries.value
            self[key] = entries
        return entries

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while place < len(self):  # the length may change during iteration
            yield self[place]
            place += 1

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


def _unpacking(name: str) -> Callable[..., object]:
    """Return a method of list that first unpacks all positions: the plain method reads the memory of the list."""
    method = getattr(list, name)

    def call(*lists: object, **options: object) -> object:
        for positions in lists:
            if isinstance(positions, Positions):
                list(positions)
        return method(*lists, **options)

    return call


_READING: Final = "add contains eq ge gt le lt mul ne repr reversed rmul".split()  # noqa: SIM905
for _name in [*map("__{}__".format, _READING), "copy", "count", "index", "pop", "remove", "sort"]:
    setattr(Positions, _name, _unpacking(_name))


_Lists = tuple[list[Entry], list[Any], list[Any]]
"""For each position: the entry of its own token; the entries of the top tokens; of the requested tokens."""


def _unpacked(rules: LogprobRules, position: Format, data: bytes, places: range, texts: list[str]) -> _Lists:
    """Unpack the entries of some positions of an extra. One loop, because it runs for each token of each stream."""
    num_top, num_values, asked_ids = rules.num_top, rules.num_values, rules.token_ids
    size, unpack = position.size, position.unpack_from
    own, top, asked = lists = cast("_Lists", ([], [], []))
    next_texts = islice(texts, places.start * (1 + num_top), None) if texts else _NO_TEXTS
    asked_texts = texts[len(texts) - len(asked_ids) :] or _NO_TEXTS
    for offset in range(places.start * size, places.stop * size, size):
        values = unpack(data, offset)
        own.append((values[0], values[num_values], next(next_texts)))
        if num_top:
            best = zip(values[1 : 1 + num_top], values[num_values + 1 :], next_texts)  # noqa: B905  # a keyword is slow
            top.append(list(best))
        if asked_ids:
            asked.append(list(zip(values[1 + num_top : num_values], asked_ids, asked_texts, strict=False)))
    return lists


class _Block:
    """The positions of one extra with deep rules."""

    def __init__(self, rules: LogprobRules, position: Format, data: bytes, num_positions: int) -> None:
        self._rules = rules
        self._position = position
        self._data = data
        self._num_positions = num_positions
        self._texts: list[str] | None = None

    def lists(self) -> _Lists:
        """Return the entries of all positions. Only the entries of the own tokens are unpacked."""
        rules, num_values = self._rules, self._rules.num_values
        texts = _decoded_texts(rules, self._position, self._data, self._num_positions)
        own, top, asked = lists = cast("_Lists", ([], [], []))
        for place in range(self._num_positions):
            start = place * self._position.size
            [logprob] = _FLOAT.unpack_from(self._data, start)
            [token_id] = _ID.unpack_from(self._data, start + _FLOAT.size * num_values)
            own.append((logprob, token_id, texts[place * (1 + rules.num_top)] if texts else None))
            if rules.num_top:
                top.append(_packed(partial(self._part, place, 1)))
            if rules.token_ids:
                asked.append(_packed(partial(self._part, place, 2)))
        return lists

    def _part(self, place: int, part: int) -> list[Entry]:
        """Unpack the entries of a position: ``part`` of ``_Lists``. The first call also decodes the texts."""
        if self._texts is None:
            self._texts = _decoded_texts(self._rules, self._position, self._data, self._num_positions)
        places = range(place, place + 1)
        [entries] = _unpacked(self._rules, self._position, self._data, places, self._texts)[part]
        return cast("list[Entry]", entries)


def _decoded_texts(rules: LogprobRules, position: Format, data: bytes, num_positions: int) -> list[str]:
    """Return the texts of all positions, then of the requested tokens. Empty if the request wants no texts."""
    return _texts.decode(memoryview(data)[num_positions * position.size :]) if rules.with_text else []


_LENGTH: Final = "output_token_logprobs_length"
_NAMES: Final = {
    side: (f"{side}_token_logprobs", f"{side}_top_logprobs", f"{side}_token_ids_logprobs")
    for side in ("input", "output")
}
"""The names of ``_Lists`` in ``meta_info``."""


class LogprobDecoder:
    """Collects the logprobs of one request, and returns them as the lists of ``meta_info``.

    Attributes:
        num_entries: the number of entries that were decoded, of all kinds.
    """

    kinds: ClassVar[frozenset[str]] = frozenset((OUTPUT_LOGPROBS, PROMPT_LOGPROBS, NEXT_LOGPROBS))

    def __init__(self, rules: LogprobRules, num_prompt: int) -> None:
        self.rules = rules
        self.num_entries = 0
        self._is_deep = rules.is_deep
        self._num_values = rules.num_values
        self._format = Format(f"<{rules.num_values}f{1 + rules.num_top}i")
        self._num_positions = rules.num_prompt_positions(num_prompt)
        self._prompt: _Lists = [], [], []
        self._output: _Lists = [], [], []
        self._first = 0  # output token of the first entry in ``_output``
        self._is_next = False

    def decode(self, extra: Extra) -> None:
        """Add the logprobs of an extra. It replaces earlier entries of the same positions."""
        is_plain = not (self._is_deep or self.rules.with_text)
        if is_plain and extra.kind == OUTPUT_LOGPROBS and extra.index - self._first == len(self._output[0]):
            self._decode_next(extra.data)
            return
        data, count, is_prompt = extra.data, 1, extra.kind == PROMPT_LOGPROBS
        lists, place = self._output, extra.index - self._first
        if is_prompt:
            lists, place = self._prompt, extra.index
            count = min(max(1, BLOCK_BYTES // self.rules.position_bytes), self._num_positions - place)  # a block
        elif extra.kind == NEXT_LOGPROBS:
            self._is_next, place = True, 0
        elif place < 0:
            return  # ``lists`` has returned it before
        if self._is_deep:
            new = _Block(self.rules, self._format, data, count).lists()
        else:
            texts = _decoded_texts(self.rules, self._format, data, count)
            new = _unpacked(self.rules, self._format, data, range(count), texts)
        if extra.kind == NEXT_LOGPROBS:
            new[0].clear()
        if is_prompt and place == self.rules.start == 0:
            own, top, asked = new
            own[0] = (None, *own[0][1:])
            top[:1] = asked[:1] = [None]
        self.num_entries += count * self.rules.num_values
        for kept, entries in cast("Iterable[tuple[list[Any], list[Any]]]", zip(lists, new, strict=True)):
            if place > len(kept) and entries:  # placeholders: a later extra replaces them
                kept += [entries[0]] * (place - len(kept))
            kept[place : place + len(entries)] = entries

    def _decode_next(self, data: bytes) -> None:
        """Add the next output token. It runs for each token of each stream, so it builds no lists of one position."""
        rules, (own, top, asked) = self.rules, self._output
        num_top, num_values = rules.num_top, self._num_values
        values = self._format.unpack_from(data)
        own.append((values[0], values[num_values], None))
        if num_top:
            top.append(list(zip(values[1 : 1 + num_top], values[num_values + 1 :], _NO_TEXTS)))  # noqa: B905
        if rules.token_ids:
            asked.append(list(zip(values[1 + num_top : num_values], rules.token_ids, _NO_TEXTS)))  # noqa: B905
        self.num_entries += num_values

    def lists(self, start: int, end: int, *, keeps: bool) -> dict[str, object]:
        """Return logprobs of the output tokens ``start`` ... ``end``. If ``start`` is 0, also of the prompt.

        keeps: later calls may read the same tokens again.
        """
        first, end = self._first, 1 if self._is_next else end
        if start == first and start and not keeps and end - first == len(self._output[0]):  # the usual chunk
            output, self._output, self._first = self._output, ([], [], []), end
            return _named("output", output, self.rules)
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


def _named(side: str, lists: _Lists, rules: LogprobRules) -> dict[str, object]:
    own, top, asked = _NAMES[side]
    named: dict[str, object] = {own: lists[0]}
    if side == "output":
        named[_LENGTH] = len(lists[0])
    if rules.num_top:
        named[top] = Positions(lists[1]) if rules.is_deep else lists[1]
    if rules.token_ids:
        named[asked] = Positions(lists[2]) if rules.is_deep else lists[2]
    return named


def with_texts(extra: Extra, rules: LogprobRules, text_of: Callable[[int], str]) -> Extra:
    """Return the extra with the texts of its tokens. An extra without logprobs is returned unchanged."""
    if extra.kind not in LogprobDecoder.kinds:
        return extra
    id_format = Format(f"<{4 * rules.num_values}x{1 + rules.num_top}i")
    ids = [token_id for position in id_format.iter_unpack(extra.data) for token_id in position]
    texts = [text_of(token_id) for token_id in (*ids, *rules.token_ids)]
    return Extra(extra.uid, extra.index, extra.kind, extra.data + msgpack.encode(texts))
