"""What an attachable request has given so far, kept so that a reader who comes back gets the rest of it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from aioengine.frontend.outputs import CallOutput, RowStream

if TYPE_CHECKING:
    from aioengine.answers import RowFacts


class Replay:
    """All text and ids of one row, in the pieces in which they came. It grows with the output and no further."""

    __slots__ = ("_text_ends", "_texts", "_token_ends", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._text_ends: list[int] = []
        self._token_ends: list[int] = []

    @property
    def num_characters(self) -> int:
        return self._text_ends[-1] if self._text_ends else 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def add(self, text: str, token_ids: list[int]) -> None:
        if text or token_ids:
            self._text_ends.append(self.num_characters + len(text))
            self._texts.append(text)
            self._token_ids += token_ids
            self._token_ends.append(len(self._token_ids))

    def since(self, offset: int) -> tuple[str, list[int], int]:
        """The text from ``offset`` on, the ids from those of that text on, and the place of the first of these.

        Ids that had no text of their own may have been read before; their place tells.

        Raises:
            ValueError: there is not so much text.
        """
        if offset > self.num_characters:
            raise ValueError(f"from_offset must be at most {self.num_characters}, the text so far, got {offset}")
        first = bisect_left(self._text_ends, offset)
        if first < len(self._texts) and self._texts[first] and self._text_ends[first] == offset:
            first += 1
        place = self._token_ends[first - 1] if first else 0
        text_start = self._text_ends[first - 1] if first else 0
        return "".join(self._texts[first:])[offset - text_start :], self._token_ids[place:], place


class LoggedRow(RowStream):
    """A row whose output is kept. ``has_reader``: it can be read, too."""

    __slots__ = ("has_reader", "replay")

    def __init__(self, output: AttachableOutput, position: int, facts: RowFacts) -> None:
        super().__init__(output, position, facts)
        self.replay = output.replay
        self.has_reader = output.has_reader

    def put(self, text: str, new: int | list[int]) -> bool:
        self.replay.add(text, [new] if isinstance(new, int) else new)
        return self.has_reader and super().put(text, new)


class AttachableOutput(CallOutput):
    """The output of a stream of one row that several readers read, one after the other; this one's part of it."""

    __slots__ = ("has_reader", "replay", "row")

    def __init__(self, rid: str, replay: Replay | None = None, *, has_reader: bool = True) -> None:
        super().__init__(rid, 1, is_stream=True, is_batch=False, returns_exceptions=False)
        self.replay = Replay() if replay is None else replay
        self.has_reader = has_reader
        self.row: LoggedRow | None = None

    def leave(self) -> None:
        """It may go on without a reader, which the engine decides."""

    def add_row(self, position: int, facts: RowFacts) -> RowStream:
        self.row = self.live[position] = LoggedRow(self, position, facts)
        self.num_held += 1
        return self.row

    def successor(self, offset: int | None) -> AttachableOutput:
        """The output of the next reader, who begins at ``offset``; None: nobody reads for now. Under the lock.

        Raises:
            ValueError: there is not so much text.
        """
        text, token_ids, place = ("", list[int](), 0) if offset is None else self.replay.since(offset)
        heir = AttachableOutput(self.rid, self.replay, has_reader=offset is not None)
        heir.num_open, heir.error, heir.is_begun, heir.wants = self.num_open, self.error, self.is_begun, self.wants
        before = self.row
        if before is not None:
            row = heir.row = LoggedRow(heir, before.position, before.facts)
            row.uid, row.has_begun = before.uid, before.has_begun
            row.finished, row.error, row.delivered_at = before.finished, before.error, before.delivered_at
            row.text_offset, row.token_offset = offset or 0, place
            if self.live:
                heir.live[row.position] = row
            heir.num_held = 1
            if text or token_ids or (row.finished is not None and row.error is None):
                RowStream.put(row, text, token_ids)
        return heir
