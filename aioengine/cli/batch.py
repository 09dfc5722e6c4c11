"""``aioengine batch``: answer the items of a JSONL file. Each answer is a row of another file."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from aioengine.api import checks
from aioengine.api.engine import AsyncEngine
from aioengine.api.jobs import ROW_ERRORS, AsyncAnswerIterator, Job, Row, failure
from aioengine.api.journal import SUFFIX, Journal, encode_row
from aioengine.api.map_items import ItemAnswers
from aioengine.errors import EngineError
from aioengine.frontend.progress import RowBar, is_wanted
from aioengine.settings.config import EngineConfig
from aioengine.supervision.tasks import post, start_thread

if TYPE_CHECKING:
    from aioengine.cli.openai_rows import OpenAIRows

STANDARD: Final = "-"
_OK: Final = 200
LINES_AHEAD: Final = 64
"""Lines of a pipe that are read before they are needed."""

_decode = msgspec.json.Decoder(str | list[int] | dict[str, Any]).decode


class BatchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``batch``.

    Attributes:
        source: the file of the items. target: the file of the rows. "-": standard input or output.
        resume: continue the job of the target.
        window: maximum number of items in flight; None: twice as many as the engine runs.
        served_model_name: names of the model in items in OpenAI's form; None: its hub id, or the name of its folder.
    """

    source: str
    target: str
    resume: bool = False
    window: int | None = None
    served_model_name: list[str] | None = None

    def check(self) -> None:
        """Raise ValueError if the target exists without ``resume``, or if the arguments contradict each other."""
        if self.window is not None:
            checks.whole("--window", self.window, 1)
        if self.target == STANDARD:
            if self.resume:
                raise ValueError("--resume needs a file for the rows; standard output cannot be continued")
            return
        if self.source != STANDARD and os.path.realpath(self.source) == os.path.realpath(self.target):
            raise ValueError(f"the rows cannot be written to their own input {self.source}")
        for path in (self.target, self.target + SUFFIX):
            if not self.resume and os.path.exists(path):
                raise ValueError(f"{path} exists; continue its job with --resume, or choose another file")


async def run(
    arguments: BatchArguments,
    config: EngineConfig,
    sampling: Mapping[str, object],
    options: Mapping[str, object],
    progress: bool | None,
) -> int:
    """Answer all items. Return how many have no answer."""
    arguments.check()
    lines = _open(arguments.source)
    is_file = stat.S_ISREG(os.fstat(lines.fileno()).st_mode)
    num_errors = 0
    with lines if is_file else nullcontext():  # the thread that reads a pipe closes it
        num_items = _num_items(lines) if is_file and is_wanted(progress) else None
        async with AsyncEngine.from_config(config) as engine:
            answers, bar = ItemAnswers(engine, sampling, options), RowBar(num_items, progress)
            openai_rows: OpenAIRows | None = None

            async def answer(index: int, line: bytes) -> Row:
                nonlocal num_errors, openai_rows
                row: Row = {"index": index}
                try:
                    item = _read_item(line)
                    if isinstance(item, dict) and "url" in item and "body" in item:
                        openai_rows = openai_rows or _openai_rows(engine, arguments.served_model_name)
                        row, num_tokens = await openai_rows.answer(index, item)
                        response: Any = row["response"]
                        num_errors += response is None or response["status_code"] != _OK
                        bar.add_tokens(num_tokens)
                        return row
                    if isinstance(item, dict) and "custom_id" in item:
                        row = {**row, "custom_id": item.pop("custom_id")}
                    answered = await answers.answer(item)
                except ROW_ERRORS as error:
                    num_errors += 1
                    return {**row, "error": failure(error)}
                bar.add_tokens(answered["meta_info"]["completion_tokens"])
                return {**row, **answered}

            target = arguments.target
            job = Job(
                answer,
                bar,
                window=arguments.window or answers.default_window,
                open_journal=None if target == STANDARD else partial(Journal, target, answers.parameters),
                returns_done=False,
            )
            items = _items(lines) if is_file else _items_of_pipe(lines)
            async with AsyncAnswerIterator(items, job) as rows:
                async for row in rows:
                    if target == STANDARD:
                        print(encode_row(row).decode(), flush=True)
    return num_errors


def _read_item(line: bytes) -> str | list[int] | dict[str, Any]:
    """Decode a line. Raises ValueError if it is no item."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the line must be a JSON text, list of token ids or object: {error}") from None


def _open(path: str) -> BinaryIO:
    # Standard input gets its own object: a thread may still read it at exit, and Python would wait for its lock.
    return open(os.dup(sys.stdin.fileno()) if path == STANDARD else path, "rb")


def _num_items(lines: BinaryIO) -> int:
    """Count the items after the current position of a file, and return to this position."""
    start = lines.tell()
    num_items = sum(1 for _ in _items(lines))
    lines.seek(start)
    return num_items


def _items(lines: BinaryIO) -> Iterator[bytes]:
    """Yield the items: the lines that are not blank, without their ends."""
    return (line.rstrip(b"\r\n") for line in lines if not line.isspace())


async def _items_of_pipe(lines: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the items of a pipe. A daemon thread reads them, because reading a pipe blocks."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[bytes] = asyncio.Queue()
    capacity = threading.Semaphore(LINES_AHEAD)

    def read() -> None:
        try:
            with lines:
                for item in _items(lines):
                    capacity.acquire()
                    if not post(loop, items.put_nowait, item):
                        return
        finally:
            post(loop, items.put_nowait, b"")  # the end: no item is empty

    start_thread(read, name="aioengine-batch")
    while item := await items.get():
        capacity.release()
        yield item


def _openai_rows(engine: AsyncEngine, model_names: Sequence[str] | None) -> OpenAIRows:
    """Import and create an ``OpenAIRows``. Raises EngineError if packages of the extra ``server`` are missing."""
    try:
        from aioengine.cli.openai_rows import OpenAIRows
    except ModuleNotFoundError as error:
        missing = f"rows in OpenAI's form need the package {error.name}: pip install 'aioengine[server]'"
        raise EngineError(missing) from error
    return OpenAIRows(engine, model_names)
