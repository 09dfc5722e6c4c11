"""The detokenizer process: converts token ids to text, and aborts requests at their stop strings. No torch.

``Child.serve`` has the loop of the process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import repeat
from typing import NoReturn

from aioengine.child_process.child import Child, run_child
from aioengine.child_process.host import limit_threads
from aioengine.constraints.patterns import PatternCache
from aioengine.errors import RequestError, describe
from aioengine.model_files.checkpoint import check_unchanged
from aioengine.protocol.board import CrashBoard, blank_board
from aioengine.protocol.columns import Extra
from aioengine.protocol.messages import (
    SCHEDULER,
    Abort,
    End,
    Fact,
    FinishCode,
    Message,
    StepOutput,
    TextChunks,
    TextOpened,
    TextRules,
)
from aioengine.protocol.packed_logprobs import with_texts
from aioengine.protocol.service import HEARTBEAT_S, Outbox
from aioengine.settings.config import Settings
from aioengine.text.detokenizer import NO_TEXT, Decode, TextPipeline, make_detokenizer
from aioengine.text.open_text import OpenText
from aioengine.text.stop import StopMatcher
from aioengine.text.token_table import TokenTable, read_token_table
from aioengine.tokenization.tokenizer import Tokenizer


class TextSource:
    """Builds text pipelines for requests. Without a tokenizer, requests have no text."""

    def __init__(self, tokenizer_path: str | None) -> None:
        """Read the tokenizer in the folder ``tokenizer_path``. None: there is no tokenizer.

        Raises:
            ValueError: the folder has no tokenizer, or its files cannot be read.
        """
        self._tokenizer = None if tokenizer_path is None else Tokenizer(tokenizer_path, only_decodes=True)
        self._patterns = PatternCache()
        self._sources: dict[bool, TokenTable | Decode] = {}
        if self._tokenizer is not None:  # almost all requests use this source, so it is built before the first one
            self._source(self._tokenizer, skip_special_tokens=True)

    def pipeline(self, rules: TextRules) -> TextPipeline:
        """Return the pipeline of a new request.

        Raises:
            ValueError: a stop pattern is invalid.
        """
        if self._tokenizer is None:
            return NO_TEXT
        source = self._source(self._tokenizer, skip_special_tokens=rules.skip_special_tokens)
        stops = None
        if rules.stop or rules.stop_regex:
            stops = StopMatcher(
                rules.stop,
                rules.stop_regex,
                no_stop_trim=rules.no_stop_trim,
                cache=self._patterns,
                clock=time.thread_time,
            )
        return TextPipeline(make_detokenizer(source, rules.context_token_ids), stops)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for incomplete characters."""
        if self._tokenizer is None:
            return ""
        source = self._source(self._tokenizer, skip_special_tokens=False)
        text = source[token_id] if isinstance(source, TokenTable) else source([token_id])
        return text if isinstance(text, str) else text.decode(errors="replace")

    def _source(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TokenTable | Decode:
        """Return the token table, or ``decode`` of the tokenizer if its decoder needs more than a table."""
        source = self._sources.get(skip_special_tokens)
        if source is None:
            table = read_token_table(tokenizer.decoding_facts(), skip_special_tokens=skip_special_tokens)
            source = table if table is not None else partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
            self._sources[skip_special_tokens] = source
        return source


_WITH_ALL_TEXT = FinishCode.STOP, FinishCode.LENGTH
"""For these ends from the scheduler, a stop in the last text changes the end."""

_MAX_REMEMBERED = 16_384
"""Maximum number of remembered requests that ended here. The scheduler may end a request before it gets the abort."""


class DetokenizerService:
    """Converts each ``StepOutput`` to a ``TextChunks``, and ends requests at their stop strings and patterns."""

    def __init__(
        self,
        source: TextSource,
        *,
        facts: Mapping[str, Fact] | None = None,
        board: CrashBoard | None = None,
    ) -> None:
        """board: crash board on which requests are recorded while they are decoded."""
        self.facts = facts or {}
        self._source = source
        self._board = board or CrashBoard(blank_board(1, 1))
        self._open: dict[int, OpenText] = {}
        self._stopped: dict[int, None] = {}  # uids of requests that ended here; the scheduler may still send their end
        self._to_abort: list[int] = []
        self._chunks: list[Message] = []
        self._sent_at = 0.0
        self._sent_to_peer_at = 0.0

    def handle(self, messages: list[Message], now: float) -> None:
        """Convert the outputs of steps. ``step`` returns the chunks."""
        for message in messages:
            if isinstance(message, StepOutput):
                self._board.begin(message.tokens.uids)
                chunks = self._convert(message, now)
                self._board.end()
                if chunks.has_news:
                    chunks.num_open = len(self._open)
                    self._chunks.append(chunks)

    def step(self, now: float) -> Outbox:
        """Return the results of the messages since the last call. Without results, return a heartbeat if it is due."""
        to_frontend, self._chunks = self._chunks, []
        if not to_frontend and now - self._sent_at >= HEARTBEAT_S:
            to_frontend.append(TextChunks(num_open=len(self._open)))
        if to_frontend:
            self._sent_at = now
        to_peer: list[Message] = []
        if self._to_abort or now - self._sent_to_peer_at >= HEARTBEAT_S:
            to_peer = [Abort(self._to_abort, FinishCode.STOP)]
            self._to_abort = []
            self._sent_to_peer_at = now
        return Outbox(to_peer, to_frontend)

    def wait_s(self, now: float) -> float:
        return max(0.0, self._sent_at + HEARTBEAT_S - now)

    def close(self) -> None:
        self._open.clear()

    def _convert(self, output: StepOutput, now: float) -> TextChunks:
        """Return the new text of one step, and end requests at their stops."""
        chunks = TextChunks()
        for opened in output.opened:
            self._begin(opened, chunks, now)
        tokens, requests = output.tokens, self._open
        if tokens.extras:
            self._pass_on(tokens.extras, chunks, now)
        ends = _ends(output) if output.ended else repeat(None)
        for uid, token_id, end in zip(tokens.uid_of_each(), tokens.token_ids, ends, strict=False):
            request = requests.get(uid)
            if request is None:
                continue  # it ended here, and the scheduler had not received the abort yet
            try:
                if request.push(token_id, end, chunks):
                    self._end_here(request, End(request.uid, FinishCode.STOP, request.matched), chunks, now)
            except Exception as error:
                self._fail(request, error, chunks, now)
        for uid in output.preempted:
            if uid in requests:
                requests[uid].num_preemptions += 1
                chunks.preempted.append(uid)
        for end in output.ended:
            self._receive_end(end, chunks, now)
        return chunks

    def _pass_on(self, extras: list[Extra], chunks: TextChunks, now: float) -> None:
        """Add the extras of open requests to ``chunks``. If a request wants it, add texts to its logprobs."""
        for extra in extras:
            request = self._open.get(extra.uid)
            if request is not None and request.logprobs is not None:
                try:
                    chunks.tokens.extras.append(with_texts(extra, request.logprobs, self._source.token_text))
                except Exception as error:
                    self._fail(request, error, chunks, now)
            elif request is not None:
                chunks.tokens.extras.append(extra)

    def _begin(self, opened: TextOpened, chunks: TextChunks, now: float) -> None:
        request = OpenText(opened)
        self._open[request.uid] = request
        chunks.first_tokens.append(opened.first_token)
        try:
            request.prepare(self._source.pipeline)
        except Exception as error:
            self._fail(request, error, chunks, now)

    def _receive_end(self, end: End, chunks: TextChunks, now: float) -> None:
        """Handle the end of a request from the scheduler: emit the rest of its text. The rest may contain a stop."""
        request = self._open.pop(end.uid, None)
        if request is None:
            if end.uid in self._stopped:
                del self._stopped[end.uid]
            else:  # it had no token
                end.ended_at = now
                chunks.ended.append(end)
            return
        try:
            stop = request.finish(chunks)
        except Exception as error:
            self._open[end.uid] = request
            self._fail(request, error, chunks, now)
            return
        if stop is not None and end.code in _WITH_ALL_TEXT:
            end.code, end.matched = FinishCode.STOP, stop
        chunks.ended.append(request.complete(end, now))

    def _end_here(self, request: OpenText, end: End, chunks: TextChunks, now: float) -> None:
        """End a request here, and abort it in the scheduler."""
        uid = request.uid
        chunks.ended.append(request.complete(end, now))
        del self._open[uid]
        self._to_abort.append(uid)
        self._stopped[uid] = None
        if len(self._stopped) > _MAX_REMEMBERED:
            del self._stopped[next(iter(self._stopped))]

    def _fail(self, request: OpenText, error: Exception, chunks: TextChunks, now: float) -> None:
        """End a request with an error. Other requests continue."""
        if not isinstance(error, RequestError):
            error = RequestError("detokenize", describe(error))
        end = End(request.uid, FinishCode.FAILED, stage=error.stage, message=error.cause)
        self._end_here(request, end, chunks, now)


def _ends(output: StepOutput) -> list[End | None]:
    """Return an entry per token: the end of its request if the token is the last one, else None."""
    ended = {end.uid: end for end in output.ended}
    ends = [ended.get(uid) for uid in output.tokens.uids]
    counts = output.tokens.counts or [1] * len(ends)
    return [end if left == 1 else None for end, count in zip(ends, counts, strict=True) for left in range(count, 0, -1)]


def build_service(settings: Settings, board: CrashBoard | None = None) -> DetokenizerService:
    """Build the service with the tokenizer of the settings.

    Raises:
        OSError: its file cannot be read.
        ValueError: the file contains no tokenizer, or has changed since the engine was created.
    """
    start = time.monotonic()
    source = TextSource(settings.text.tokenizer_path)
    check_unchanged(settings.text.files)
    return DetokenizerService(source, facts={"detokenizer_load_s": round(time.monotonic() - start, 3)}, board=board)


def work(child: Child) -> None:
    limit_threads(1)
    child.serve(build_service(child.settings, child.board), SCHEDULER)


def main() -> NoReturn:
    run_child(work)
