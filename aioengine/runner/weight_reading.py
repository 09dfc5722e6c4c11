"""Read the tensors of checkpoint files into the model's parameters, with several threads.

A tensor is read in pieces of some rows. For a GPU, pieces are read into pinned memory and copied to the device while
the next piece is read. For a CPU, a piece is read directly into the parameter if the dtypes are equal. So at most
``NUM_READERS * NUM_BUFFERS`` pieces are in memory beside the parameters, for any size of tensors and files. A tensor
that cannot be divided, such as a transposed one, is one piece. X bytes or elements, R rows, C elements of a row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.codes import FP8
from aioengine.kernels.gguf_blocks import dequantized
from aioengine.layers.layer import Slice, Target, errors_of
from aioengine.model_files import checkpoint, folder_files
from aioengine.model_files.checkpoint import Entry
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.protocol.weight_messages import DTYPE_NAMES
from aioengine.quantization._base import RowWriter

Report = Callable[[int, int], None]

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, dtype) for dtype, name in DTYPE_NAMES.items()}
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
        writer: quantizes the rows of a placeholder.
        head_size: rows per head if the two halves of heads are interleaved; 0: they are not.
        first_row: the index in the placeholder of the first row for the writer.
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
    first_row: int = 0

    @property
    def same_bytes(self) -> Tensor | None:
        """The bytes [X] of ``target`` if they equal the bytes of the file; None: the file is converted."""
        is_same = DTYPES.get(self.entry.dtype) == self.target.dtype and self.target.is_contiguous()
        if not is_same or self.target.is_meta or self.writer is not None or self.head_size or self.index:
            return None
        return self.target.view(-1).view(torch.uint8)

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
        ValueError: see ``read_all`` and ``check_values``.
    """
    whole = {
        entry.name: Target(torch.empty(entry.shape, dtype=targets[entry.name].tensor.dtype, device="meta"))
        for entry in entries
    }
    read_all(entries, whole, lambda done, total: None)
    for entry in entries:
        if targets[entry.name].check is not None:
            with folder_files.open_existing(entry.path) as file:
                check_values(read_tensor(file, entry), entry.name, targets[entry.name])


def check_values(values: Tensor, name: str, target: Target) -> None:
    """Raise ValueError if loading could not be finished with values [...] of the checkpoint tensor ``name``."""
    if target.check is not None:
        with errors_of(layer_of(name)):
            target.check(values)


def layer_of(name: str) -> str:
    """Return the layer of a tensor. bitsandbytes stores "weight", "weight.absmax" and others for a layer."""
    layer, found, _ = name.rpartition(".weight.")
    return layer if found else name.rpartition(".")[0]


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
    """Yield pieces of full rows and heads, or the tensor if it cannot be divided. An empty tensor has no pieces."""
    if not entry.num_bytes:
        return
    head_size = entry.shape[0] // entry.num_heads if entry.num_heads and entry.shape else 0
    rows = _rows_of(entry, target, head_size)
    if rows is None:
        tensor = target.tensor.detach()
        yield _Piece(entry, entry.begin, entry.num_bytes, entry.shape, tensor, target.index, head_size, target.writer)
        return
    own_bytes = sum(size for _, size in rows.columns) or rows.row_bytes
    step = PIECE_BYTES // own_bytes
    if entry.dtype not in DTYPES:
        step = min(step, PIECE_ELEMENTS // rows.target.shape[1])
    unit = head_size or 1
    step = max(step // unit, 1) * unit
    num_done = 0
    for start, end in rows.ranges:
        for first in range(start, end, step):
            part = rows.target[num_done : num_done + min(step, end - first)]
            yield _Piece(
                entry,
                entry.begin + first * rows.row_bytes,
                len(part) * own_bytes,
                tuple(part.shape),
                part,
                head_size=head_size,
                writer=target.writer,
                columns=rows.columns,
                row_bytes=rows.row_bytes,
                first_row=num_done * rows.written_rows,
            )
            num_done += len(part)


class _Rows(NamedTuple):
    """How a tensor is divided into rows.

    Attributes:
        target: [R, ...] the rows of the parameter.
        ranges: (start, stop) of these rows in the file, ascending.
        row_bytes: distance of the rows in the file.
        columns: as in ``_Piece``.
        written_rows: rows that the writer gets for each row.
    """

    target: Tensor
    ranges: Sequence[tuple[int, int]]
    row_bytes: int
    columns: tuple[tuple[int, int], ...] = ()
    written_rows: int = 1


def _rows_of(entry: Entry, target: Target, head_size: int) -> _Rows | None:
    """Divide a tensor into rows; None: it must be read at once.

    If a rank needs only a part of a tensor, it reads only the bytes of this part where possible (``_is_in_blocks``).
    Then a row is an index of the first dimension.
    """
    source, tensor = target.source, target.tensor.detach()
    is_vector = len(entry.shape) < 2
    if is_vector and entry.dtype not in DTYPES:  # a row of a vector has one element, but a block has many
        return None
    if target.writer is not None and target.writer.is_whole:
        return None
    if source is None:
        rows = _as_rows(tensor, 1 if is_vector else entry.shape[-1])
        return None if rows is None else _Rows(rows, [(0, len(rows))], entry.num_bytes // len(rows))
    if head_size or not _is_in_blocks(entry, target, source):
        return None
    num_rows = entry.shape[0]
    columns = _columns(entry, source) if source.dim else ()
    ranges = [(0, num_rows)] if columns else source.ranges
    return _Rows(tensor, ranges, entry.num_bytes // num_rows, columns, math.prod(tensor.shape[1:-1]))


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
    if (same_bytes := piece.same_bytes) is not None:
        _read_piece(file, piece, same_bytes)
        stored = piece.target
    else:
        content = torch.empty(piece.num_bytes, dtype=torch.uint8)
        _read_piece(file, piece, content)
        stored = piece.store(content)
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
        _read_piece(file, piece, content)
        with torch.cuda.stream(self.stream):
            if (same_bytes := piece.same_bytes) is not None:
                same_bytes.copy_(content, non_blocking=True)
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


def _read_piece(file: BinaryIO, piece: _Piece, content: Tensor) -> None:
    """Read the bytes of a piece into content [X]."""
    runs = [(0, piece.num_bytes)]
    if piece.columns:
        starts = range(0, len(piece.target) * piece.row_bytes, piece.row_bytes)
        runs = [(start + offset, size) for start in starts for offset, size in piece.columns]
    unread = _bytes_of(content)  # slices of it take less time than slices of the tensor
    for offset, num_bytes in runs:
        _read_bytes(file, piece.entry, unread[:num_bytes], piece.begin + offset)
        unread = unread[num_bytes:]


def _bytes_of(content: Tensor) -> memoryview:
    """Return the memory of content [X] uint8."""
    return memoryview(content.numpy())  # pyright: ignore[reportArgumentType]


def _read_bytes(file: BinaryIO, entry: Entry, unread: memoryview, position: int) -> None:
    """Fill ``unread`` with bytes of the file from ``position`` on. Releases the GIL. entry: named in errors."""
    while unread:
        try:
            size = os.preadv(file.fileno(), [unread], position)
        except OSError as error:
            raise ValueError(f"cannot read {entry.path}: tensor {entry.stored_name}: {error.strerror}") from error
        if not size:
            raise ValueError(f"{entry.path} was changed while it was read: tensor {entry.stored_name} is truncated")
        unread, position = unread[size:], position + size


def read_tensor(file: BinaryIO, entry: Entry, *, is_pinned: bool = False) -> Tensor:
    """Read a tensor [*entry.shape] of an open file. Releases the GIL.

    Small files are read with it while steps run. Mapping a file and copying it to pinned memory takes several times as
    long, because of page faults.

    is_pinned: read into pinned memory, which allows direct DMA to a GPU.

    Raises:
        ValueError: the dtype is not supported, the file cannot be read, or it was changed.
    """
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.path}: {entry.name} is of type {entry.dtype}; allowed: {', '.join(DTYPES)}")
    content = torch.empty(entry.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    _read_bytes(file, entry, _bytes_of(content), entry.begin)
    return content.view(DTYPES[entry.dtype]).view(entry.shape)


def read_arrays(path: str, *, is_pinned: bool) -> dict[str, Tensor]:
    """Read all tensors [...] of a file. Return name -> tensor.

    Raises:
        ValueError: the file cannot be read, or is not a safetensors file.
    """
    entries = checkpoint.entries_of_file(Path(path))
    with folder_files.open_existing(Path(path)) as file:
        return {entry.name: read_tensor(file, entry, is_pinned=is_pinned) for entry in entries}
