"""Logprobs on their way from the runner to the caller: what a request asks for, and the bytes that answer it.

They travel as ``Extra``s. The runner writes the numbers of each position, little-endian, one position behind the other:

    float32: the logprobs of the token itself, of the likeliest tokens (best first), of the tokens asked for
    int32:   the ids of the token itself and of the likeliest tokens

Where the request wants texts, the detokenizer appends those of all these ids, then of the tokens asked for, as one list
in msgpack. No number becomes a Python object before ``LogprobReader`` makes the lists of an answer.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter
from struct import Struct as Format
from typing import TYPE_CHECKING, Final

from msgspec import Struct, msgpack

from aioengine.protocol.columns import Extra

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT_LOGPROBS: Final = "logprobs"
"""``Extra.kind`` of an output token."""

PROMPT_LOGPROBS: Final = "prompt_logprobs"
"""``Extra.kind`` of the prompt from ``LogprobRules.start`` on. Of position 0 only the id has a meaning."""

NEXT_LOGPROBS: Final = "next_logprobs"
"""``Extra.kind`` of the position behind the prompt of a SCORE request. It has no token: its first logprob and id mean
nothing.
"""

_KINDS: Final = frozenset((OUTPUT_LOGPROBS, PROMPT_LOGPROBS, NEXT_LOGPROBS))

Entry = tuple[float | None, int, str | None]
"""Logprob, token id, text."""

_NO_TEXTS: Final = repeat(None)

_index = attrgetter("index")
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
    """Makes the lists of ``meta_info`` for one request, by its ``rules``."""

    __slots__ = ("_format", "_num_prompt", "_num_top", "_num_values", "_token_ids", "_with_text", "rules")

    def __init__(self, rules: LogprobRules, num_prompt: int) -> None:
        self.rules = rules
        self._num_prompt = num_prompt
        self._num_top, self._num_values = rules.num_top, rules.num_values
        self._token_ids, self._with_text = rules.token_ids, rules.with_text
        self._format = Format(f"<{rules.num_values}f{1 + rules.num_top}i")

    def empty(self, side: str) -> dict[str, object]:
        """The lists of ``side`` ("input" or "output") without any position."""
        return self._named(side, ([], [], []))

    def read(self, extras: list[Extra], *, is_first: bool) -> tuple[dict[str, object], list[Extra]]:
        """The lists that the ``extras`` of a chunk give, and the extras of other kinds.

        ``is_first``: it is the first chunk of the request, which has the lists of the prompt.
        """
        output: _Lists = [], [], []
        prompt: _Lists = [], [], []
        others: list[Extra] = []
        for extra in extras if len(extras) == 1 else sorted(extras, key=_index):
            kind = extra.kind
            if kind == OUTPUT_LOGPROBS:
                self._add(extra.data, 1, output)
            elif kind == PROMPT_LOGPROBS:
                self._add(extra.data, self.rules.num_prompt_positions(self._num_prompt), prompt)
                if self.rules.start == 0:
                    own, top, asked = prompt
                    own[0] = (None, *own[0][1:])
                    top[:1] = asked[:1] = [None]
            elif kind == NEXT_LOGPROBS:
                self._add(extra.data, 1, output)
                output[0].pop()
            else:
                others.append(extra)
        named = self._named("output", output)
        return (named | self._named("input", prompt) if is_first else named), others

    def _add(self, data: bytes, num_positions: int, lists: _Lists) -> None:
        """Append the entries of positions."""
        texts: list[str] = []
        if self._with_text:
            end = num_positions * self._format.size
            data, texts = data[:end], _texts.decode(data[end:])
        if num_positions > 1:
            self._add_columns(data, texts, lists)
            return
        own, top, asked = lists
        num_top, num_values, ids = self._num_top, self._num_values, self._token_ids
        values = self._format.unpack(data)
        next_texts = iter(texts) if texts else _NO_TEXTS
        own.append((values[0], values[num_values], next(next_texts)))
        if num_top:
            best = zip(values[1 : 1 + num_top], values[num_values + 1 :], next_texts)  # noqa: B905  # a keyword is slow
            top.append(list(best))
        if ids:
            asked.append(list(zip(values[1 + num_top : num_values], ids, next_texts, strict=False)))

    def _add_columns(self, numbers: bytes, texts: list[str], lists: _Lists) -> None:
        """Append the entries of many positions, without a step of Python for each."""
        own, top, asked = lists
        num_top, num_values, asked_ids = self._num_top, self._num_values, self._token_ids
        num_texts = max(len(texts) - len(asked_ids), 0)
        asked_texts = texts[num_texts:] or _NO_TEXTS
        view = memoryview(numbers)
        values, ids, width = view.cast("f"), view.cast("i"), num_values + 1 + num_top
        ranks = [
            zip(
                values[place::width].tolist(),
                ids[num_values + place :: width].tolist(),
                texts[place : num_texts : 1 + num_top] or _NO_TEXTS,
                strict=False,
            )
            for place in range(1 + num_top)
        ]
        own += ranks[0]
        if num_top:
            top += map(list, zip(*ranks[1:], strict=True))
        if asked_ids:
            columns = [
                zip(values[1 + num_top + place :: width].tolist(), repeat(token_id), repeat(text), strict=False)
                for place, (token_id, text) in enumerate(zip(asked_ids, asked_texts, strict=False))
            ]
            asked += map(list, zip(*columns, strict=True))

    def _named(self, side: str, lists: _Lists) -> dict[str, object]:
        own, top, asked = _NAMES[side]
        named: dict[str, object] = {own: lists[0]}
        if side == "output":
            named[_LENGTH] = len(lists[0])
        if self._num_top:
            named[top] = lists[1]
        if self._token_ids:
            named[asked] = lists[2]
        return named


def with_texts(extra: Extra, rules: LogprobRules, text_of: Callable[[int], str]) -> Extra:
    """The extra with the texts of its tokens appended; one of another kind as it is."""
    if extra.kind not in _KINDS:
        return extra
    id_format = Format(f"<{4 * rules.num_values}x{1 + rules.num_top}i")
    ids = [token_id for position in id_format.iter_unpack(extra.data) for token_id in position]
    texts = [text_of(token_id) for token_id in (*ids, *rules.token_ids)]
    return Extra(extra.uid, extra.index, extra.kind, extra.data + msgpack.encode(texts))
