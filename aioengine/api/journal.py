"""Journal: the finished rows of a job in a file, so that a killed job continues where it ended.

A job has two files:

    PATH            the rows, as JSON lines in the order in which they ended. Each has its index.
    PATH.journal    a JSON line with the parameters of the job, then 8 bytes per item: a digest of the item.

A row is in PATH as soon as it has ended, and is not computed again. If the program is killed while it writes a row, the
end of this row is missing, and the next start removes its beginning. Both files are synced to the disk every second, so
a power failure costs at most the rows of the last second.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, BinaryIO, Final

import msgspec

from aioengine.api import checks
from aioengine.constraints.parameters import json_schema

SUFFIX: Final = ".journal"
SYNC_INTERVAL_S: Final = 1.0

_DIGEST_BYTES: Final = 8
_ID_PREFIX: Final = "batch_req_"


class _Indexed(msgspec.Struct):
    """The part of a row that has its index: ``index``, or ``id`` in OpenAI's form."""

    index: int = -1
    id: str = ""


_decode = msgspec.json.Decoder(_Indexed).decode


def _decode_index(line: bytes) -> int:
    """Return the index of a row, or a negative number. Raises DecodeError or UnicodeDecodeError if it is not JSON."""
    row = _decode(line)
    number = row.id.removeprefix(_ID_PREFIX)
    return int(number) if row.index < 0 and number.isdecimal() else row.index


def openai_id(index: int) -> str:
    """Return the ``id`` of a row in OpenAI's form."""
    return f"{_ID_PREFIX}{index}"


def as_json(value: object, name: str) -> bytes:
    """Encode a value of the caller. Equal values have equal texts.

    Raises:
        TypeError: JSON cannot represent it. The message has ``name``.
    """
    try:
        return msgspec.json.encode(value, enc_hook=_plain, order="deterministic")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} of a job with a checkpoint must consist of JSON values: {error}") from None


def encode_row(row: Mapping[str, object]) -> bytes:
    """Encode a row. Arrays become lists."""
    return msgspec.json.encode(row, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, type):
        return json_schema("json_schema", value)
    if isinstance(value, checks.Array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


class Journal:
    """The files of one job. Used by one thread at a time, but ``sync`` may run in another thread."""

    _journal_fd = _rows_fd = -1
    _earlier_rows: BinaryIO | None = None  # the file of the rows, for ``read``

    def __init__(self, path: str | os.PathLike[str], parameters: Mapping[str, object]) -> None:
        """Create the files of a new job, or open the files of a job with the same ``parameters``.

        Raises:
            ValueError: the files belong to another job, or the file was changed. They are not changed.
            BlockingIOError: another process writes them. OSError: they cannot be written.
        """
        self.path = os.fspath(path)
        self._num_bytes = 0  # of the complete rows in the file
        self._is_done = bytearray()
        self._read_ahead: dict[int, bytes] = {}  # index -> row in the file before a row that was asked for
        self._synced_at = time.monotonic()
        header = as_json(parameters, "the parameters") + b"\n"
        has_rows = os.path.exists(self.path) and os.path.getsize(self.path) > 0
        if has_rows and not os.path.exists(self.path + SUFFIX):
            raise ValueError(f"{self.path} exists, but not its journal {self.path + SUFFIX}; choose another file")
        self._journal_fd = os.open(self.path + SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(self._journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"another process is writing {self.path}; wait for its end") from None
            self._write_header(header, may_be_new=not has_rows)
            self._digests_at = len(header)
            self._rows_fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._read_rows()
            self.sync()
            self._sync_folder()
        except BaseException:
            self.close()
            raise

    def _write_header(self, header: bytes, *, may_be_new: bool) -> None:
        """Write the parameters to a new journal, or compare them."""
        with open(self.path + SUFFIX, "rb") as journal:
            known = journal.readline()
        if may_be_new and not known.endswith(b"\n"):  # a new job, or one that was killed at this moment
            os.truncate(self._journal_fd, 0)
            _write(self._journal_fd, header)
        elif known != header:
            changed = _first_difference(known, header)
            raise ValueError(f"{self.path} belongs to a job with other parameters: {changed}; choose another file")

    def _read_rows(self) -> None:
        """Read the indices of the rows, and remove the rest of a row that was not written completely."""
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                index = _index_of(line)
                if index is None:
                    if lines.read(1):
                        raise ValueError(f"line {number} of {self.path} is not a row of its job; restore the file")
                    break
                if self.is_done(index):
                    raise ValueError(f"line {number} of {self.path} repeats the row {index}; restore the file")
                self._mark_done(index)
                self._num_bytes += len(line)
        os.truncate(self._rows_fd, self._num_bytes)

    # ------------------------------------------------------------ items

    def is_done(self, index: int) -> bool:
        """Return whether the file has the row ``index``."""
        return index < len(self._is_done) and bool(self._is_done[index])

    def record_item(self, index: int, item: bytes) -> None:
        """Record the digest of an item.

        Raises:
            ValueError: an earlier run recorded another item with this index.
        """
        digest = blake2b(item, digest_size=_DIGEST_BYTES).digest()
        position = self._digests_at + _DIGEST_BYTES * index
        known = os.pread(self._journal_fd, _DIGEST_BYTES, position)
        if len(known) < _DIGEST_BYTES or not any(known):  # it is new, or its digest was lost in a power failure
            os.pwrite(self._journal_fd, digest, position)
        elif known != digest:
            raise ValueError(f"item {index} is not the item that {self.path} was written for; choose another file")

    def check_end(self, num_items: int) -> None:
        """Raise ValueError if the file has rows of more than ``num_items`` items."""
        if self._is_done.rfind(1) >= num_items:
            raise ValueError(f"the input has {num_items} items, and {self.path} has the row {self._is_done.rfind(1)}")

    # ------------------------------------------------------------ rows

    def read(self, index: int) -> dict[str, Any]:
        """Return a row of an earlier run. Each row may be read once.

        Rows that come before it in the file stay in memory until they are read.
        """
        if self._earlier_rows is None:
            self._earlier_rows = open(self.path, "rb")  # noqa: SIM115  # closed by close
        while index not in self._read_ahead:
            line = self._earlier_rows.readline()
            self._read_ahead[_decode_index(line)] = line
        return msgspec.json.decode(self._read_ahead.pop(index), type=dict[str, Any])

    def append(self, index: int, row: Mapping[str, object]) -> None:
        """Write a row. Raises OSError, for example if the disk is full."""
        line = encode_row(row) + b"\n"
        try:
            _write(self._rows_fd, line)
        except OSError:
            os.truncate(self._rows_fd, self._num_bytes)  # otherwise the next row would continue a part of this one
            raise
        self._num_bytes += len(line)
        self._mark_done(index)

    def _mark_done(self, index: int) -> None:
        missing = index + 1 - len(self._is_done)
        if missing > 0:
            self._is_done += bytes(missing)
        self._is_done[index] = 1

    # ------------------------------------------------------------ the disk

    @property
    def is_sync_due(self) -> bool:
        return time.monotonic() - self._synced_at >= SYNC_INTERVAL_S

    def sync(self) -> None:
        """Write both files to the disk. Blocks for some milliseconds."""
        self._synced_at = time.monotonic()
        os.fsync(self._journal_fd)  # first, because it has the digests of the rows
        os.fsync(self._rows_fd)

    def _sync_folder(self) -> None:
        folder = os.open(os.path.dirname(os.path.abspath(self.path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the files. May be called twice."""
        for file in (self._journal_fd, self._rows_fd):
            if file >= 0:
                os.close(file)
        self._journal_fd = self._rows_fd = -1
        if self._earlier_rows is not None:
            self._earlier_rows.close()

    def __del__(self) -> None:
        self.close()  # for a job that was left while a thread opened its files


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _index_of(line: bytes) -> int | None:
    """Return the index of a row; None: the line is no complete row."""
    if not line.endswith(b"\n"):
        return None
    try:
        index = _decode_index(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if index < 0 else index


def _first_difference(known: bytes, header: bytes) -> str:
    """Describe the first parameter that differs."""
    try:
        before = msgspec.json.decode(known, type=dict[str, Any])
    except msgspec.DecodeError:
        return "its journal has none"
    after = msgspec.json.decode(header, type=dict[str, Any])
    for name in [*before, *after]:
        was, now = (msgspec.json.encode(parameters.get(name)).decode() for parameters in (before, after))
        if was != now:
            return f"{name} was {_shown(was)} and is {_shown(now)}"
    return "the form of their JSON text"


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
