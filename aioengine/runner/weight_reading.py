"""Reads the tensors of checkpoint files into the model's parameters, with several threads.

A tensor is read in pieces of some rows. For a GPU each goes through pinned memory and is copied from there while the
next one is read; for a CPU it is read straight into the parameter where the types are the same. So at most
``NUM_READERS * NUM_BUFFERS`` pieces are in memory beside the parameters, however large a tensor or a file is.
X bytes or numbers, R rows, C numbers of a row.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from aioengine import folder_files
from aioengine.runner.gguf_blocks import dequantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

    from aioengine.checkpoint import Entry
    from aioengine.layers.placement import Target

    Report = Callable[[int, int], None]

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

PIECE_BYTES: Final = 8 << 20
PIECE_NUMBERS: Final = 2 << 20
"""Of a piece of blocks, which become several tensors in fp32 on their way."""
NUM_READERS: Final = 8
NUM_CPU_READERS: Final = 4
NUM_BUFFERS: Final = 2
"""Pieces of a reader: one is read while the other is copied."""
ALONE_BYTES: Final = 32 << 20
"""Less than this is read on the thread that asks for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Part of a tensor of a file.

    Attributes:
        begin: the place of its first byte in the file.
        shape: of the numbers that are read.
        index: of those that are wanted among them.
        target: where they go.
        head_size: rows of each head whose halves take turns; 0: they do not.
    """

    entry: Entry
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    target: Tensor
    index: tuple[slice, ...] = ()
    head_size: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the bytes in the file are those of the target."""
        is_changed = self.index or self.head_size or DTYPES.get(self.entry.dtype) != self.target.dtype
        return not is_changed and self.target.is_contiguous()

    def numbers(self, content: Tensor) -> Tensor:
        """content [X] of bytes -> the wanted numbers, in the shape of the target [...]."""
        entry = self.entry
        dtype = DTYPES.get(entry.dtype)
        found = (dequantized(content, entry.dtype) if dtype is None else content.view(dtype)).view(self.shape)
        if self.head_size:
            found = _halves_apart(found, self.head_size)
        return found[self.index]


def read_all(entries: list[Entry], targets: dict[str, Target], report: Report) -> None:
    """Fill ``targets`` with the tensors of ``entries``, which fit them.

    ``report`` is called, on this thread, with the bytes read so far and in all.

    Raises:
        ValueError: a file cannot be read or is truncated, or a tensor has numbers that are not finite in the type of
            the model; the message names them.
    """
    pieces = [piece for entry in entries for piece in _pieces(entry, targets[entry.name])]
    total = sum(piece.num_bytes for piece in pieces)
    report(0, total)
    if not pieces:
        return
    device = pieces[0].target.device
    sums = torch.zeros(len(pieces), dtype=torch.float32, device=device)
    work = _Work(pieces, sums)
    num_readers = NUM_READERS if device.type == "cuda" else min(NUM_CPU_READERS, torch.get_num_threads())
    sizes = work.read() if total < ALONE_BYTES else _read_in_threads(work, num_readers)
    done = 0
    for size in sizes:
        done += size
        report(done, total)
    _check_finite(pieces, sums)


def _pieces(entry: Entry, target: Target) -> Iterator[_Piece]:
    """Pieces of whole rows and heads; the tensor itself where it cannot be divided. None where it has no numbers."""
    if not entry.num_bytes:
        return
    head_size = entry.shape[0] // entry.num_heads if entry.num_heads and entry.shape else 0
    rows = None if target.source else _as_rows(target.tensor, entry.shape[-1] if len(entry.shape) > 1 else 1)
    if rows is None:
        whole = target.tensor.detach()
        yield _Piece(entry, entry.begin, entry.num_bytes, entry.shape, whole, target.index, head_size)
        return
    row_bytes = entry.num_bytes // len(rows)
    step = PIECE_BYTES // row_bytes
    if entry.dtype not in DTYPES:
        step = min(step, PIECE_NUMBERS // rows.shape[1])
    unit = head_size or 1
    step = max(step // unit, 1) * unit
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        begin, num_bytes = entry.begin + first * row_bytes, len(part) * row_bytes
        yield _Piece(entry, begin, num_bytes, tuple(part.shape), part, head_size=head_size)


def _as_rows(tensor: Tensor, row_size: int) -> Tensor | None:
    """tensor [...] seen as [R, C]; None: its rows are not at equal distances in memory."""
    try:
        return tensor.detach().view(-1, row_size)
    except RuntimeError:
        return None


def _halves_apart(rows: Tensor, head_size: int) -> Tensor:
    """rows [R] or [R, C], in which the two halves of each head take turns -> in the order of the halves."""
    return rows.view(-1, head_size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


class _Work:
    """The pieces that are still to be read, for any number of threads."""

    def __init__(self, pieces: list[_Piece], sums: Tensor) -> None:
        """``sums``: [pieces], where the sum of each piece goes."""
        self._waiting = iter(enumerate(pieces))
        self._lock = threading.Lock()
        self._sums = sums
        self._buffer_bytes = min(PIECE_BYTES, max(piece.num_bytes for piece in pieces))
        self._before = torch.cuda.current_stream(sums.device) if sums.is_cuda else None

    @torch.inference_mode()
    def read(self) -> Iterator[int]:
        """Read pieces until none is left; yields the bytes of each that was read."""
        stager = _CPUStager(self._buffer_bytes)
        if self._before is not None:
            stager = _GPUStager(self._buffer_bytes, self._before)
        file: BinaryIO | None = None
        path: Path | None = None
        try:
            while (item := self._next()) is not None:
                number, piece = item
                if file is None or piece.entry.path != path:
                    if file is not None:
                        file.close()
                    path = piece.entry.path
                    file = _opened(path)
                stager.fill(piece, file, self._sums[number])
                yield piece.num_bytes
            stager.finish()
        finally:
            if file is not None:
                file.close()

    def stop(self) -> None:
        """Leave nothing to read."""
        with self._lock:
            self._waiting = iter(())

    def _next(self) -> tuple[int, _Piece] | None:
        with self._lock:
            return next(self._waiting, None)


class _CPUStager:
    """Brings pieces from files into parameters of a CPU."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8)

    def fill(self, piece: _Piece, file: BinaryIO, total: Tensor) -> None:
        """Read a piece to its place, and its sum to ``total`` []."""
        if piece.is_plain:
            _read(file, piece, piece.target.view(torch.uint8))
        else:
            piece.target.copy_(piece.numbers(_read(file, piece, _buffer_for(piece, self._buffer))))
        _add_up(piece, total)

    def finish(self) -> None:
        """All is in its place."""


class _GPUStager:
    """Brings pieces from files through pinned memory into parameters of a GPU, on a stream of its own."""

    def __init__(self, buffer_bytes: int, before: torch.cuda.Stream) -> None:
        """``before``: what runs there comes first."""
        self._stream = torch.cuda.Stream(before.device)
        self._stream.wait_stream(before)
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def fill(self, piece: _Piece, file: BinaryIO, total: Tensor) -> None:
        """Read a piece, and queue its way to its place and its sum to ``total`` []."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        copied = self._copied[self._turn]
        copied.synchronize()
        content = _read(file, piece, _buffer_for(piece, self._buffers[self._turn]))
        with torch.cuda.stream(self._stream):
            if piece.is_plain:
                piece.target.copy_(piece.numbers(content), non_blocking=True)
            else:
                piece.target.copy_(piece.numbers(content.to(piece.target.device, non_blocking=True)))
            copied.record()
            _add_up(piece, total)

    def finish(self) -> None:
        """Wait until all is in its place."""
        self._stream.synchronize()


def _buffer_for(piece: _Piece, buffer: Tensor) -> Tensor:
    """``buffer`` [X], or memory of the piece's own if it is larger; cut to its size."""
    size = piece.num_bytes
    return buffer[:size] if size <= len(buffer) else torch.empty(size, dtype=torch.uint8)


def _add_up(piece: _Piece, total: Tensor) -> None:
    """total []: the sum of the numbers of a piece, which is finite only if all of them are; 0 for whole numbers."""
    if piece.target.is_floating_point() and piece.target.itemsize > 1:
        total.copy_(piece.target.sum())


def _check_finite(pieces: list[_Piece], sums: Tensor) -> None:
    """sums [pieces]. Raises ValueError for numbers that are not finite; a sum of large ones may overflow alone."""
    for number in (~sums.isfinite()).nonzero().flatten().tolist():
        piece = pieces[number]
        if not piece.target.isfinite().all():
            kind = str(piece.target.dtype).removeprefix("torch.")
            message = (
                f"{piece.entry.path}: tensor {piece.entry.stored_name} has numbers that are not finite in {kind} (NaN, "
                "infinite, or too large); the file is damaged, or the model needs a larger dtype"
            )
            raise ValueError(message)


def _read_in_threads(work: _Work, num_readers: int) -> Iterator[int]:
    """Let several threads read; yields the bytes of each piece that was read, and raises what the first one raised."""
    results: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def read() -> None:
        try:
            for size in work.read():
                results.put(size)
        except BaseException as error:  # raised by the thread that waits
            results.put(error)
        else:
            results.put(None)

    threads = [threading.Thread(target=read, name="aioengine-weights", daemon=True) for _ in range(num_readers)]
    for thread in threads:
        thread.start()
    try:
        num_running = len(threads)
        while num_running:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                num_running -= 1
            else:
                yield result
    finally:
        work.stop()
        for thread in threads:
            thread.join()


def _opened(path: Path) -> BinaryIO:
    file = folder_files.open_file(path)
    if file is None:
        message = f"cannot read {path}: it was removed while the weights were read"
        raise ValueError(message)
    return file


def _read(file: BinaryIO, piece: _Piece, content: Tensor) -> Tensor:
    """content [X], of as many bytes as the piece, filled from the file. Python's lock is free meanwhile."""
    rest, position = memoryview(content.numpy()), piece.begin  # pyright: ignore[reportArgumentType]
    while rest:
        try:
            size = os.preadv(file.fileno(), [rest], position)
        except OSError as error:
            message = f"cannot read {piece.entry.path}: tensor {piece.entry.stored_name}: {error.strerror}"
            raise ValueError(message) from error
        if not size:
            message = f"{piece.entry.path} was changed while it was read: tensor {piece.entry.stored_name} is truncated"
            raise ValueError(message)
        rest, position = rest[size:], position + size
    return content
