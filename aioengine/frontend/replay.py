"""What an attachable request has given so far, kept so that a reader who comes back gets the rest of it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from aioengine import answers
from aioengine.frontend.outputs import CallOutput, RowStream, Wants

if TYPE_CHECKING:
    from aioengine.answers import RowError, RowFacts
    from aioengine.protocol.columns import Extra
    from aioengine.protocol.messages import Finished


class Replay:
    """All text, ids and extras of one row, in the pieces in which they came. It grows as the output does."""

    __slots__ = ("_text_ends", "_texts", "_token_ends", "_token_ids", "extras")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._text_ends: list[int] = []
        self._token_ends: list[int] = []
        self.extras: dict[tuple[int, str], Extra] = {}

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
    """The row of an attachable request: its output is kept, and goes on to the row of the present reader."""

    __slots__ = ("request",)

    def __init__(self, request: AttachableOutput, position: int, facts: RowFacts) -> None:
        super().__init__(request, position, facts)
        self.request = request

    def put(self, text: str, new: int | list[int]) -> bool:
        self.request.replay.add(text, [new] if isinstance(new, int) else new)
        reader = self.request.reader
        return reader is not None and reader.row is not None and reader.row.put(text, new)

    def put_extra(self, extra: Extra) -> None:
        self.request.replay.extras[extra.index, extra.kind] = extra
        if (reader := self.request.reader) is not None and reader.row is not None:
            reader.row.put_extra(extra)


class ReaderOutput(CallOutput):
    """The part of an attachable request's output that one reader gets.

    It is left for good (``is_left``) when its reader leaves, or when another one attaches.
    """

    __slots__ = ("_request", "row")

    def __init__(self, request: AttachableOutput) -> None:
        super().__init__(request.rid, 1, is_stream=True, is_batch=False, returns_exceptions=False)
        self._request = request
        self.row: RowStream | None = None

    @property
    def request(self) -> AttachableOutput:
        return self._request

    def add_row(self, position: int, facts: RowFacts) -> RowStream:
        self.row = super().add_row(position, facts)
        return self.row

    @property
    def has_unread_end(self) -> bool:
        """Whether the request has ended and its reader does not know."""
        row = self.row
        return self.error is None and row is not None and row.finished is not None and row.is_queued

    def close(self) -> None:
        """Its reader gets nothing more, wherever it waits."""
        self.is_left = True
        self.ready.clear()
        self.wake()


class AttachableOutput(CallOutput):
    """The output of a stream of one row that several readers read, one after the other. The engine's side of it.

    It is the same from the beginning of the request to its end, and passes everything on to the present reader.

    Attributes:
        reader: the present reader's part; None while nobody reads.
    """

    __slots__ = ("_wants", "reader", "replay", "row")

    def __init__(self, rid: str) -> None:
        self.reader: ReaderOutput | None = None
        super().__init__(rid, 1, is_stream=True, is_batch=False, returns_exceptions=False)
        self.replay = Replay()
        self.row: LoggedRow | None = None
        self.reader = ReaderOutput(self)
        self.ready = self.reader.ready

    @property
    def read_side(self) -> CallOutput:
        assert self.reader is not None, "nobody reads it"
        return self.reader

    @property
    def wants(self) -> Wants:
        return self._wants

    @wants.setter
    def wants(self, wants: Wants) -> None:
        self._wants = wants
        if self.reader is not None:
            self.reader.wants = wants

    @property
    def num_kept_tokens(self) -> int:
        """Of its output, and of the prompt where readers get it."""
        num_prompt_tokens = 0 if self.row is None else len(self.row.facts.prompt_token_ids)
        return self.replay.num_tokens + num_prompt_tokens

    # ------------------------------------------------------------ readers, under the lock

    def new_reader(self, offset: int) -> ReaderOutput:
        """A reader of the text from the ``offset``-th character on, to be attached.

        Raises:
            ValueError: there is not so much text.
        """
        text, token_ids, place = self.replay.since(offset)
        reader = ReaderOutput(self)
        reader.wants = self.wants
        if self.row is not None:
            row = reader.add_row(self.row.position, self.row.facts)
            row.text_offset, row.token_offset = offset, place
            for extra in self.replay.extras.values():
                row.put_extra(extra)
            if text or token_ids:
                row.put(text, token_ids)
            if self.row.finished is not None:
                reader.end_row(row, self.row.finished, self.row.delivered_at, self.row.error)
        if self.is_accepted:
            reader.accept()
        if self.error is not None:
            reader.fail(self.error)
        return reader

    def attach(self, reader: ReaderOutput) -> None:
        """Give ``reader`` all that comes from now on; the one before is at its end."""
        if (old := self.reader) is not None:
            old.wake()  # it looks again once the lock is free
            # From here on nothing is called: a signal handler that raises comes before all of it, or after.
            old.is_left = True
        self.reader, self.ready = reader, reader.ready

    def detach(self) -> None:
        """Nobody reads for now."""
        if self.reader is not None:
            self.reader.close()
        self.reader = None

    # ------------------------------------------------------------ from the engine, under the lock

    def add_row(self, position: int, facts: RowFacts) -> RowStream:
        row = self.row = self.live[position] = LoggedRow(self, position, facts)
        if self.reader is not None:
            self.reader.add_row(position, facts)
        return row

    def accept(self) -> None:
        self.is_accepted = self.is_accepted or self.error is None
        if self.reader is not None:
            self.reader.accept()

    def end_row(self, row: RowStream, finished: Finished, delivered_at: float, error: RowError | None = None) -> None:
        row.finished, row.delivered_at = finished, delivered_at
        row.error = answers.error(finished) if error is None else error
        self.error = self.error or row.error
        self.num_open -= 1
        del self.live[row.position]
        if self.reader is not None and self.reader.row is not None:
            self.reader.end_row(self.reader.row, finished, delivered_at, error)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        if self.reader is not None:
            self.reader.fail(error)

    def end(self) -> None:
        """The request is over: nobody needs its prompt any more, except readers who get it."""
        self.wants = Wants.ENDS  # the time in which it can be attached to begins when a reader has come to its end
        if self.row is not None and not self.row.facts.shows_prompt:
            self.row.facts.prompt_token_ids = []

    def wake(self) -> None:
        if self.reader is not None:
            self.reader.wake()
