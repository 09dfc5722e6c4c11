"""Read the tensors of checkpoint files into the model's parameters, with several threads.

A tensor is read in pieces of some rows. For a GPU, pieces are read into pinned memory and copied to the device while
the next piece is read. For a CPU, a piece is read directly into the parameter if the dtypes are equal. So at most
``NUM_READERS * NUM_BUFFERS`` pieces are in memory beside the parameters, for any size of tensors and files. X bytes or
elements, R rows, C elements of a row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final

import torch
from torch import Tensor

from aioengine.kernels.codes import FP8
from aioengine.kernels.gguf_blocks import dequantized
from aioengine.layers.layer import Slice, Target
from aioengine.model_files import checkpoint, folder_files
from aioengine.model_files.checkpoint import Entry
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.quantization._base import RowWriter

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
"""dtype name in safetensors files -> torch dtype."""

PIECE_BYTES: Final = 8 << 20
PIECE_ELEMENTS: Final = 2 << 20
"""Maximum elements of a piece of quantized blocks, because dequantization needs several fp32 tensors."""
NUM_READERS: Final = 8
NUM_CPU_READERS: Final = 4
NUM_BUFFERS: Final = 2
"""Buffers per reader: one is filled while the other is copied."""
SMALL_BYTES: Final = 32 << 20
"""Less than this is read by one thread."""
_MAX_REPORTS: Final = 200
_FP8_NAN: Final = 0x7F
"""The bits of NaN in fp8 (e4m3), which has no infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of a tensor in a file.

    Attributes:
        begin: offset of its first byte in the file.
        num_bytes: bytes that are read.
        columns: (offset, size) in bytes of the parts of each row that are read; (): all of it.
        row_bytes: distance of the rows in the file, if ``columns`` is not empty.
        shape: shape of the elements that are read.
        index: the part of these elements that is used.
        target: the destination, in a parameter, or a placeholder.
        writer: quantizes the rows of a placeholder, from row ``first_row`` on.
        head_size: rows per head if the two halves of heads are interleaved; 0: they are not.
        same_bytes: the bytes [X] of ``target`` if they equal the bytes of the file; None: the file is converted.
    """

    entry: Entry
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    target: Tensor
    index: tuple[slice | Tensor, ...] = ()
    head_size: int = 0
    writer: RowWriter | None = None
    columns: tuple[tuple[int, int], ...] = ()
    row_bytes: int = 0
    same_bytes: Tensor | None = None
    first_row: int = 0

    def store(self, content: Tensor) -> Tensor:
        """Convert content [X] (bytes) to elements, store them, and return the elements [...] that must be finite.

        A target on the device "meta" has no memory: its elements are only checked.
        """
        dtype = DTYPES.get(self.entry.dtype)
        if self.writer is not None and self.writer.stored:
            values = content.view(self.shape[0], -1)
        else:
            values = dequantized(content, self.entry.dtype) if dtype is None else content.view(dtype)
            values = values.view(self.shape)
        if self.head_size:
            # rows [R] or [R, C] with interleaved halves of heads -> first half, then second half of each head
            halves = values.view(-1, self.head_size // 2, 2, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
        values = values[self.index]
        if self.target.is_meta:
            return values.to(self.target.dtype)
        if self.writer is not None:
            self.writer.write(self.first_row, values)
            return self.writer.scales[self.first_row :][: len(values)] if self.writer.stored else values
        self.target.copy_(values)
        return self.target


def read_all(entries: list[Entry], targets: dict[str, Target], report: Report) -> None:
    """Fill ``targets`` with the tensors of ``entries``, whose names and shapes are already checked.

    report: called in this thread with the bytes read so far and the total.

    Raises:
        ValueError: a file cannot be read or is truncated, or a tensor has numbers that are not finite in the dtype of
            the model. The message names the file and the tensor.
    """
    pieces = [piece for entry in entries for piece in _pieces(entry, targets[entry.name])]
    total = sum(piece.num_bytes for piece in pieces)
    report(0, total)
    if not pieces:
        return
    device = pieces[0].target.device
    num_readers = NUM_READERS if device.type == "cuda" else min(NUM_CPU_READERS, torch.get_num_threads())
    if total < SMALL_BYTES:
        num_readers = 1
    done = reported = 0
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(folder_files.open_existing(path, f"cannot read {path}: it was removed"))
            for path in {piece.entry.path for piece in pieces}
        }
        idle: SimpleQueue[_PinnedCopier] = SimpleQueue()
        if device.type == "cuda":
            buffer_bytes = min(PIECE_BYTES, max(piece.num_bytes for piece in pieces))
            for _ in range(num_readers):
                copier = _PinnedCopier(buffer_bytes, torch.cuda.current_stream(device))
                stack.callback(copier.stream.synchronize)
                idle.put(copier)

        @torch.inference_mode()
        def read(piece: _Piece) -> None:
            file = files[piece.entry.path]
            if device.type != "cuda":
                _load_to_cpu(piece, file)
                return
            copier = idle.get()
            try:
                copier.load(piece, file)
            finally:
                idle.put(copier)

        pool = stack.enter_context(ThreadPoolExecutor(num_readers, thread_name_prefix="aioengine-weights"))
        for piece, _ in zip(pieces, pool.map(read, pieces), strict=True):
            done += piece.num_bytes
            if done == total or done - reported >= total / _MAX_REPORTS:
                reported = done
                report(done, total)
    if device.type == "cuda":
        _check_on_gpu(entries, targets)


def check_all(entries: list[Entry], targets: Mapping[str, Target]) -> None:
    """Read the tensors of ``entries``, and check that their numbers are finite in the dtypes of ``targets``.

    targets: on the device "meta", so nothing is written.

    Raises:
        ValueError: see ``read_all``.
    """
    whole = {
        entry.name: Target(torch.empty(entry.shape, dtype=targets[entry.name].tensor.dtype, device="meta"))
        for entry in entries
    }
    read_all(entries, whole, lambda done, total: None)


def check_finite(values: Tensor, dtype: torch.dtype, shown: str) -> None:
    """Raise ValueError if values [...] are not finite in ``dtype``. shown: their name, for the message."""
    if not dtype.is_floating_point or not values.is_floating_point():
        return
    stored = values.to(dtype)
    if not math.isfinite(float(_finite_sum(stored))) and (dtype == FP8 or not bool(stored.isfinite().all())):
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{shown} has numbers that are not finite in {kind} (NaN, infinite, or too large): the weights are "
            "damaged, or the model needs a larger dtype"
        )


def _pieces(entry: Entry, target: Target) -> Iterator[_Piece]:
    """Yield pieces of full rows and heads, or the tensor if it cannot be divided. An empty tensor has no pieces.

    If a rank needs only a part of a tensor, it reads only the bytes of this part where possible (``_is_in_blocks``).
    Then a row is an index of the first dimension.
    """
    if not entry.num_bytes:
        return
    source, writer, tensor = target.source, target.writer, target.tensor.detach()
    head_size = entry.shape[0] // entry.num_heads if entry.num_heads and entry.shape else 0
    is_float, is_vector = entry.dtype in DTYPES, len(entry.shape) < 2
    rows: Tensor | None = None
    columns: tuple[tuple[int, int], ...] = ()
    written_rows = 1  # rows that the writer gets for each row of a piece
    needs_all = writer is not None and writer.is_whole
    if (is_float or not is_vector) and not needs_all:  # a row of a vector has one element, but a block has many
        if source is None:
            rows = _as_rows(tensor, 1 if is_vector else entry.shape[-1])
        elif not head_size and _is_in_blocks(entry, target, source):
            rows, written_rows = tensor, math.prod(tensor.shape[1:-1])
            columns = _columns(entry, source) if source.dim else ()
    if rows is None:
        yield _Piece(entry, entry.begin, entry.num_bytes, entry.shape, tensor, target.index, head_size, writer)
        return
    num_rows = len(rows) if source is None else entry.shape[0]
    ranges = [(0, num_rows)] if source is None or columns else source.ranges
    row_bytes = entry.num_bytes // num_rows
    own_bytes = sum(size for _, size in columns) or row_bytes
    step = PIECE_BYTES // own_bytes
    if not is_float:
        step = min(step, PIECE_ELEMENTS // rows.shape[1])
    unit = head_size or 1
    step = max(step // unit, 1) * unit
    row = 0
    for first, stop in [(first, min(first + step, end)) for start, end in ranges for first in range(start, end, step)]:
        part = rows[row : row + stop - first]
        is_same = writer is None and not head_size and DTYPES.get(entry.dtype) == part.dtype
        is_same &= part.is_contiguous() and not part.is_meta
        yield _Piece(
            entry,
            entry.begin + first * row_bytes,
            len(part) * own_bytes,
            tuple(part.shape),
            part,
            columns=columns,
            row_bytes=row_bytes,
            head_size=head_size,
            same_bytes=part.view(-1).view(torch.uint8) if is_same else None,
            writer=writer,
            first_row=row * written_rows,
        )
        row += len(part)


def _columns(entry: Entry, source: Slice) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) in bytes of the parts of each row that a rank reads."""
    num_runs = math.prod(entry.shape[1 : source.dim])
    run_bytes = entry.num_bytes // entry.shape[0] // num_runs
    ranges = [(a * run_bytes // source.total, b * run_bytes // source.total) for a, b in source.ranges]
    return tuple((run * run_bytes + a, b - a) for run in range(num_runs) for a, b in ranges)


def _is_in_blocks(entry: Entry, target: Target, source: Slice) -> bool:
    """Return whether a rank can read its part of a tensor without the rest of the rows.

    Raises ValueError if the part is not whole blocks of a GGUF file, and the target keeps their numbers.
    """
    writer = target.writer
    block = 1 if entry.dtype in DTYPES or source.dim < len(entry.shape) - 1 else BLOCKS[entry.dtype][0]
    if not any(edge % block for pair in source.ranges for edge in pair):
        return True
    if writer is None or not writer.stored:
        return False
    raise ValueError(
        f"{entry.path}: ranks would divide blocks of {block} inputs of tensor {entry.stored_name} ({entry.dtype})"
    )


def _as_rows(tensor: Tensor, row_size: int) -> Tensor | None:
    """Return a view [R, C] of tensor [...]; None: its rows are not at equal distances in memory."""
    try:
        return tensor.detach().view(-1, row_size)
    except RuntimeError:
        return None


def _load_to_cpu(piece: _Piece, file: BinaryIO) -> None:
    """Read a piece into its target, and check its elements while they are in the cache."""
    if piece.same_bytes is not None:
        _fill(file, piece, piece.same_bytes)
        stored = piece.target
    else:
        stored = piece.store(_fill(file, piece, torch.empty(piece.num_bytes, dtype=torch.uint8)))
    check_finite(stored, stored.dtype, f"{piece.entry.path}: tensor {piece.entry.stored_name}")


class _PinnedCopier:
    """Copies pieces to the GPU through pinned memory, on a separate ``stream``, for one thread at a time."""

    def __init__(self, buffer_bytes: int, before: torch.cuda.Stream) -> None:
        """before: the copies wait for the work queued on this stream."""
        self.stream = torch.cuda.Stream(before.device)
        self.stream.wait_stream(before)
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def load(self, piece: _Piece, file: BinaryIO) -> None:
        """Read a piece, and queue its copy to the target."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer, copied, size = self._buffers[self._turn], self._copied[self._turn], piece.num_bytes
        copied.synchronize()
        content = buffer[:size] if size <= len(buffer) else torch.empty(size, dtype=torch.uint8)
        _fill(file, piece, content)
        with torch.cuda.stream(self.stream):
            if piece.same_bytes is not None:
                piece.same_bytes.copy_(content, non_blocking=True)
            else:
                piece.store(content.to(piece.target.device, non_blocking=True))
            copied.record()


def _finite_sum(tensor: Tensor) -> Tensor:
    """Return a number that is finite only if all elements [...] are. A sum may also overflow, but not with fp8."""
    if tensor.dtype != FP8:
        return tensor.sum().float()
    largest = tensor.view(torch.uint8).bitwise_and(_FP8_NAN).amax()  # without the signs
    return (largest != _FP8_NAN).float().reciprocal()


@torch.inference_mode()
def _check_on_gpu(entries: list[Entry], targets: dict[str, Target]) -> None:
    """Raise ValueError for elements that are not finite. This takes as long as reading the memory of the GPU once."""
    for entry in entries:
        writer, tensor = targets[entry.name].writer, targets[entry.name].tensor
        tensor = tensor if writer is None else writer.scales
        check_finite(tensor, tensor.dtype, f"{entry.path}: tensor {entry.stored_name}")


def _fill(file: BinaryIO, piece: _Piece, content: Tensor) -> Tensor:
    """Fill content [X], which has the bytes of the piece, from the file, and return it. Releases the GIL."""
    unread = memoryview(content.numpy())  # pyright: ignore[reportArgumentType]
    runs = [(0, piece.num_bytes)]
    if piece.columns:
        starts = range(0, len(piece.target) * piece.row_bytes, piece.row_bytes)
        runs = [(start + offset, size) for start in starts for offset, size in piece.columns]
    for offset, num_bytes in runs:
        _read(file, piece, unread[:num_bytes], piece.begin + offset)
        unread = unread[num_bytes:]
    return content


def _read(file: BinaryIO, piece: _Piece, rest: memoryview, position: int) -> None:
    """Fill ``rest`` with bytes of the file from ``position`` on."""
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


def read_tensor(file: BinaryIO, entry: Entry, *, is_pinned: bool = False) -> Tensor:
    """Read a tensor [*entry.shape] of an open file. Releases the GIL.

    Small files are read with it while steps run. Mapping a file and copying it to pinned memory takes several times as
    long, because of page faults.

    is_pinned: read into pinned memory, which allows direct DMA to a GPU.

    Raises:
        ValueError: the dtype is not supported, or the file was changed.
    """
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.path}: {entry.name} is of type {entry.dtype}; allowed: {', '.join(DTYPES)}")
    content = torch.empty(entry.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    file.seek(entry.begin)
    if file.readinto(content.numpy()) != entry.num_bytes:  # type: ignore[attr-defined]
        raise ValueError(f"{entry.path} was changed while it was read")
    return content.view(DTYPES[entry.dtype]).view(entry.shape)


def read_arrays(path: str, *, is_pinned: bool) -> dict[str, Tensor]:
    """Read all tensors [...] of a file. Return name -> tensor.

    Raises:
        ValueError: the file cannot be read, or is not a safetensors file.
    """
    entries = checkpoint.entries_of_file(Path(path))
    with folder_files.open_existing(Path(path)) as file:
        return {entry.name: read_tensor(file, entry, is_pinned=is_pinned) for entry in entries}
