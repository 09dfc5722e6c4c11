"""Outputs that keep what was read of them.

That of an attachable request is a log, in which each reader has a cursor, one reader after the other. That of requests
of sessions keeps the ids of its rows.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from aioengine.frontend.calls.outputs import CallOutput, Cursor, RowStream, Wants, drop_old_states
from aioengine.protocol.messages import LAST_STATES

if TYPE_CHECKING:
    from aioengine.api.answers import Chunk, RowFacts
    from aioengine.protocol.columns import Extra


class Log:
    """All text, ids and extras of one row, in the pieces in which they came. It grows as the output does."""

    __slots__ = ("_text_ends", "_texts", "_token_ends", "extras", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.extras: dict[tuple[int, str], Extra] = {}
        self._texts: list[str] = []
        self._text_ends: list[int] = []
        self._token_ends: list[int] = []

    @property
    def num_characters(self) -> int:
        return self._text_ends[-1] if self._text_ends else 0

    def add(self, text: str, token_ids: list[int]) -> None:
        if text or token_ids:
            self._text_ends.append(self.num_characters + len(text))
            self._texts.append(text)
            self.token_ids += token_ids
            self._token_ends.append(len(self.token_ids))

    def text_since(self, offset: int) -> str:
        first = self._piece_of(offset)
        text_start = self._text_ends[first - 1] if first else 0
        return "".join(self._texts[first:])[offset - text_start :]

    def token_place(self, offset: int) -> int:
        """The place of the first id of the text from ``offset`` on.

        Ids without text of their own may have been read before; their place shows it.

        Raises:
            ValueError: there is not so much text.
        """
        if offset > self.num_characters:
            raise ValueError(f"from_offset must be at most {self.num_characters}, the text so far, got {offset}")
        first = self._piece_of(offset)
        return self._token_ends[first - 1] if first else 0

    def _piece_of(self, offset: int) -> int:
        """The first piece that is not wholly before ``offset``; one without text belongs to the text behind it."""
        first = bisect_left(self._text_ends, offset)
        if first < len(self._texts) and self._texts[first] and self._text_ends[first] == offset:
            first += 1
        return first


class SessionRow(RowStream):
    """A row of a session. ``kept_ids``: all its output ids so far."""

    __slots__ = ("kept_ids",)

    def __init__(self, output: CallOutput, position: int, facts: RowFacts) -> None:
        super().__init__(output, position, facts)
        self.kept_ids: list[int] = []

    def put(self, text: str, new: int | list[int]) -> bool:
        self.kept_ids += [new] if isinstance(new, int) else new
        return super().put(text, new)


class SessionOutput(CallOutput):
    """The output of a call with ``session_params``."""

    __slots__ = ()

    def add_row(self, position: int, facts: RowFacts) -> SessionRow:
        self.num_held += 1
        row = self.live[position] = SessionRow(self, position, facts)
        return row


class LoggedRow(RowStream):
    """The row of an attachable request, on the engine's side: it writes its output to a log."""

    __slots__ = ("log", "request")

    def __init__(self, request: AttachableOutput, position: int, facts: RowFacts) -> None:
        super().__init__(request, position, facts)
        self.request = request
        self.log = Log()

    @property
    def kept_ids(self) -> list[int]:
        """All its output ids so far."""
        return self.log.token_ids

    def put(self, text: str, new: int | list[int]) -> bool:
        self.log.add(text, [new] if isinstance(new, int) else new)
        return self.request.queue()

    def put_extra(self, extra: Extra) -> None:
        if any(extra.kind in reader.kinds for reader in self.facts.readers):
            super().put_extra(extra)  # its readers keep it, for all views
            return
        self.log.extras[extra.index, extra.kind] = extra
        if self.request.view is not None:
            self.request.view.put_extra(extra)
        if self.facts.states == LAST_STATES:
            drop_old_states(self.log.extras, len(self.log.token_ids))


class LogView(RowStream):
    """The row as one reader reads it: from its log, behind the offsets."""

    __slots__ = ("_logged",)

    keeps = True

    def __init__(self, logged: LoggedRow, text_offset: int, token_offset: int) -> None:
        super().__init__(logged.output, logged.position, logged.facts)
        self._logged = logged
        self.text_offset, self.token_offset = text_offset, token_offset
        for extra in logged.log.extras.values():
            self.put_extra(extra)

    def num_known(self) -> int:
        return len(self._logged.log.token_ids)

    def take(self) -> Chunk:
        logged = self._logged
        self.finished, self.delivered_at, self.error = logged.finished, logged.delivered_at, logged.error
        self.text, self.unread = logged.log.text_since(self.text_offset), logged.log.token_ids[self.token_offset :]
        return super().take()


class AttachableOutput(CallOutput):
    """The output of a stream of one row that goes on when its reader leaves. Readers read it one after the other.

    Attributes:
        cursor: of the present reader, or of the one that left last. view: the row as that reads it.
    """

    __slots__ = ("row", "view")

    def __init__(self, rid: str) -> None:
        super().__init__(rid, 1, is_stream=True, is_batch=False, returns_exceptions=False)
        self.row: LoggedRow | None = None
        self.view: LogView | None = None

    @property
    def num_kept_tokens(self) -> int:
        """Of its output, and of the prompt where readers get it; a logprob takes the memory of about one token."""
        if self.row is None:
            return 0
        facts = self.row.facts
        num_entries = sum(reader.num_entries for reader in facts.readers)
        return len(self.row.log.token_ids) + len(facts.prompt_token_ids) + num_entries

    @property
    def has_unread_end(self) -> bool:
        """Whether the request has ended and its present reader does not know."""
        is_unread = self.view is not None and self.view.is_queued and not self.cursor.is_closed
        return is_unread and self.error is None and self.num_open == 0

    def queue(self) -> bool:
        """There is more to read; whether the reader is to be woken."""
        if self.view is None or self.view.is_queued or self.cursor.is_closed:
            return False
        self.view.is_queued = True
        self.cursor.ready.append(self.view)
        return True

    def mark_left(self, cursor: Cursor) -> None:
        cursor.is_closed = True

    def new_reader(self, offset: int) -> tuple[Cursor, LogView | None]:
        """The arguments of ``attach``, for a reader of the text from the ``offset``-th character on.

        Raises:
            ValueError: there is not so much text.
        """
        cursor, row = Cursor(self), self.row
        log = Log() if row is None else row.log
        place = log.token_place(offset)
        if row is None:
            return cursor, None
        view = LogView(row, offset, place)
        is_ended = row.finished is not None and row.error is None
        if is_ended or offset < log.num_characters or place < len(log.token_ids):
            view.is_queued = True
            cursor.ready.append(view)
        return cursor, view

    def attach(self, cursor: Cursor, view: LogView | None) -> None:
        """Make another reader the present one; the one before comes to its end."""
        old = self.cursor
        old.wake()  # it looks again once the lock is free
        # From here on nothing is called: a signal handler that raises comes before all of it, or after.
        old.is_closed = True
        self.cursor, self.view = cursor, view

    def add_row(self, position: int, facts: RowFacts) -> LoggedRow:
        self.num_held += 1
        row = self.row = self.live[position] = LoggedRow(self, position, facts)
        self.view = LogView(row, 0, 0)
        return row

    def end(self) -> None:
        """The request is over: its prompt is not needed any more, except for readers who get it."""
        self.wants = Wants.ENDS  # the time in which it can be attached to starts when a reader has come to its end
        if self.row is not None and not self.row.facts.shows_prompt:
            self.row.facts.prompt_token_ids = []


KeptRow = SessionRow | LoggedRow
"""A row whose output ids are kept."""
