"""The detokenizer process: ids come in, text goes out; no torch here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from aioengine.errors import RequestError
from aioengine.processes.child import Child, run_child
from aioengine.processes.host import limit_threads
from aioengine.processes.open_text import ChunkColumns, OpenText
from aioengine.processes.text_source import TextSource
from aioengine.protocol.board import NO_END
from aioengine.protocol.messages import (
    Abort,
    Begun,
    Ended,
    FinishCode,
    Finished,
    Message,
    Opened,
    StepOutput,
    TextChunks,
)
from aioengine.protocol.service import HEARTBEAT_S, Outbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.config import Settings
    from aioengine.protocol.board import StepBoard

_STAGE = "detokenize"
# So many requests that ended here are remembered, since the scheduler may have ended them too before it heard of it.
_MAX_REMEMBERED = 16_384


class DetokenizerService:
    """Turns each ``StepOutput`` into a ``TextChunks``; ends requests at their stop strings."""

    def __init__(
        self,
        source: TextSource,
        *,
        facts: Mapping[str, str | int | float | bool] | None = None,
        board: StepBoard | None = None,
    ) -> None:
        """``board``: where the requests are told whose text is made."""
        self.facts = facts or {}
        self._source = source
        self._board = board
        self._open: dict[int, OpenText] = {}
        self._stopped: dict[int, None] = {}  # in order of their ends
        self._to_abort: list[int] = []
        self._chunks: list[Message] = []
        self._sent_at = 0.0
        self._told_peer_at = 0.0

    @property
    def num_remembered(self) -> int:
        """Requests that ended here and of whose end the scheduler may still tell."""
        return len(self._stopped)

    def handle(self, messages: list[Message], now: float) -> None:
        for message in messages:
            if isinstance(message, StepOutput):
                if self._board is not None:
                    uids = message.uids
                    self._board.begin(uids, lambda uids=uids: [NO_END] * len(uids))
                columns = self._read(message, now)
                if self._board is not None:
                    self._board.end()
                if columns.has_news:
                    self._chunks.append(columns.as_message(num_open=len(self._open)))

    def step(self, now: float) -> Outbox:
        """What came of the messages since the last call; nothing for long: an empty message, as a sign of life."""
        to_frontend, self._chunks = self._chunks, []
        if not to_frontend and now - self._sent_at >= HEARTBEAT_S:
            to_frontend.append(TextChunks([], [], [], [], num_open=len(self._open)))
        if to_frontend:
            self._sent_at = now
        to_peer: list[Message] = []
        if self._to_abort or now - self._told_peer_at >= HEARTBEAT_S:
            to_peer = [Abort(self._to_abort, FinishCode.STOP)]
            self._to_abort = []
            self._told_peer_at = now
        return Outbox(to_peer, to_frontend)

    def wait_s(self, now: float) -> float:
        return max(0.0, self._sent_at + HEARTBEAT_S - now)

    def close(self) -> None:
        self._open.clear()

    def _read(self, output: StepOutput, now: float) -> ChunkColumns:
        columns = ChunkColumns()
        for opened in output.opened:
            self._begin(opened, columns, now)
        ended = {end.uid: end for end in output.ended}
        requests = self._open
        for uid, token_id in zip(output.uids, output.token_ids, strict=True):
            request = requests.get(uid)
            if request is None:
                continue  # a stop string ended it before the scheduler heard of that
            try:
                if request.push(token_id, ended.get(uid) if ended else None, columns):
                    self._end_here(request, columns, now)
            except Exception as error:
                self._fail(request, error, columns, now)
        for uid in output.preempted:
            if uid in requests:
                requests[uid].num_preemptions += 1
                columns.preempted.append(uid)
        for end in output.ended:
            self._end(end, columns, now)
        return columns

    def _begin(self, opened: Opened, columns: ChunkColumns, now: float) -> None:
        request = OpenText(opened)
        self._open[opened.uid] = request
        columns.begun.append(Begun(opened.uid, opened.num_cached, opened.admitted_at, opened.first_token_at))
        try:
            request.prepare(self._source)
        except Exception as error:
            self._fail(request, error, columns, now)

    def _end(self, end: Ended, columns: ChunkColumns, now: float) -> None:
        """The scheduler ended a request: give the rest of its text, which may itself hold a stop."""
        request = self._open.pop(end.uid, None)
        if request is None:
            if end.uid in self._stopped:
                del self._stopped[end.uid]
            else:  # it never gave a token
                columns.finished.append(Finished(end.uid, end.code, end.matched, end.stage, end.message, ended_at=now))
            return
        code, matched = end.code, end.matched
        try:
            stop = request.finish(columns)
        except Exception as error:
            self._open[end.uid] = request
            self._fail(request, error, columns, now)
            return
        if stop is not None and code in (FinishCode.STOP, FinishCode.LENGTH):
            code, matched = FinishCode.STOP, stop
        columns.finished.append(request.finished(code, now, matched=matched, stage=end.stage, message=end.message))

    def _end_here(self, request: OpenText, columns: ChunkColumns, now: float) -> None:
        """A stop string ended it; the scheduler is told to free it."""
        columns.finished.append(request.finished(FinishCode.STOP, now, matched=request.matched))
        self._forget(request.uid)

    def _fail(self, request: OpenText, error: Exception, columns: ChunkColumns, now: float) -> None:
        """Something in its own text went wrong: this request ends, the others go on."""
        message = error.cause if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
        columns.finished.append(request.finished(FinishCode.FAILED, now, stage=_STAGE, message=message))
        self._forget(request.uid)

    def _forget(self, uid: int) -> None:
        del self._open[uid]
        self._to_abort.append(uid)
        self._stopped[uid] = None
        if len(self._stopped) > _MAX_REMEMBERED:
            del self._stopped[next(iter(self._stopped))]


def build_service(settings: Settings, board: StepBoard | None = None) -> DetokenizerService:
    """Read the tokenizer that the settings name.

    Raises:
        OSError: its file cannot be read.
        ValueError: it holds no tokenizer.
    """
    start = time.monotonic()
    source = TextSource(settings.text.tokenizer_path)
    return DetokenizerService(source, facts={"detokenizer_load_s": round(time.monotonic() - start, 3)}, board=board)


def work(child: Child) -> None:
    limit_threads(1)
    child.serve(build_service(child.settings, child.board), child.orders.endpoints.scheduler)


def main() -> NoReturn:
    run_child(work)
