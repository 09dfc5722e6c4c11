"""Reads the header of a GGUF file: its metadata, and the offset of each tensor.

All counts, lengths and offsets are checked against the size of the file before memory of that size is allocated.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Why not ``GGUFReader`` of the package ``gguf``: it makes a numpy array of each item of an array. For 152,000 tokens and
as many merges it takes 6 s of CPU time instead of 0.1 s, and each process of an engine reads the header.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from aioengine.api import checks

Scalar: TypeAlias = "bool | int | float | str"

BLOCKS: Final = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Supported tensor types -> (elements, bytes) of a block."""

_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""``ggml_type`` -> its name."""

_STRING, _ARRAY = 8, 9
_FORMS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``gguf_metadata_value_type`` of numbers -> format of ``struct``."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
"""Vocabularies of 260,000 tokens need about 10 MB."""
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS = 65_536, 262_144, 1 << 22
_MAX_NAME, _MAX_DIMENSIONS = 4096, 4
_FIRST_READ: Final = 1 << 20


class GgufArray(Struct, frozen=True):
    """An array in the metadata. Its items are decoded on demand.

    Attributes:
        kind: ``gguf_metadata_value_type`` of the items.
        content: bytes of the items.
    """

    key: str
    kind: int
    num_items: int
    content: bytes

    @property
    def has_texts(self) -> bool:
        """Whether the items are strings. Otherwise they are numbers."""
        return self.kind == _STRING

    def texts(self) -> list[str]:
        """Decode strings. Invalid UTF-8 becomes U+FFFD. Raises ValueError if the items are numbers."""
        if not self.has_texts:
            raise ValueError(f"{self.key} must be an array of strings, not numbers")
        texts: list[str] = []
        position = 0
        for _ in range(self.num_items):
            end = position + 8 + int.from_bytes(self.content[position : position + 8], "little")
            texts.append(self.content[position + 8 : end].decode(errors="replace"))
            position = end
        return texts

    def numbers(self) -> tuple[float, ...]:
        """Decode numbers. Raises ValueError if the items are strings."""
        if self.has_texts:
            raise ValueError(f"{self.key} must be an array of numbers, not strings")
        return struct.unpack(f"<{self.num_items}{_FORMS[self.kind]}", self.content)


Metadata: TypeAlias = "dict[str, Scalar | GgufArray]"


class TensorInfo(Struct, frozen=True):
    """A tensor in the file. ``begin``: offset of its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


class Header(Struct, frozen=True):
    """The header of a GGUF file. ``tensors``: in the order of their bytes."""

    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


class _HeaderReader:
    """Reads the bytes of a header from a file as needed. ``position``: the offset of the next byte."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self._content = b""
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises ValueError if the file is too short or the header too large."""
        begin, end = self.position, self.position + num_bytes
        if end > len(self._content):
            self._read_to(end)
        self.position = end
        return self._content[begin:end]

    def take_texts(self, num_texts: int) -> bytes:
        """Return the bytes of the next strings. A vocabulary has about 100,000."""
        unpack, content, end = struct.Struct("<Q").unpack_from, self._content, self.position
        for _ in range(num_texts):
            if end + 8 > len(content):
                content = self._read_to(end + 8)
            end += 8 + unpack(content, end)[0]
        return self.take(end - self.position)

    def _read_to(self, end: int) -> bytes:
        """Read up to ``end`` or beyond. Return all bytes of the header so far."""
        if end > self.size:
            raise ValueError(f"it is truncated: it has {self.size} bytes, and its header continues to {end}")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MAX_HEADER_BYTES} bytes")
        self._content += self._file.read(max(end, _FIRST_READ, 2 * len(self._content)) - len(self._content))
        if end > len(self._content):
            raise ValueError("it was changed while it was read")
        return self._content

    def number(self, form: str) -> int:
        """Return the next number. ``form``: format of ``struct``; it may also be a bool or float."""
        value: int = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]
        return value

    def text(self, max_bytes: int) -> str:
        size = self.number("Q")
        if size > max_bytes:
            raise ValueError(f"it has a name of {size} bytes at {self.position}")
        return self.take(size).decode(errors="replace")

    def value(self, key: str) -> Scalar | GgufArray:
        """Return the next value of the metadata."""
        kind = self.number("I")
        if kind in _FORMS:
            return self.number(_FORMS[kind])
        if kind == _STRING:
            return self.text(_MAX_HEADER_BYTES)
        if kind != _ARRAY:
            raise ValueError(f"{checks.shown(key)} has a value of the unknown type {kind}")
        kind, num_items = self.number("I"), self.number("Q")
        if kind != _STRING and kind not in _FORMS:
            raise ValueError(f"{checks.shown(key)} is an array of type {kind}, which is not supported")
        if num_items > _MAX_ITEMS:
            raise ValueError(f"{checks.shown(key)} has {num_items} items; the limit is {_MAX_ITEMS}")
        is_text = kind == _STRING
        content = self.take_texts(num_items) if is_text else self.take(num_items * struct.calcsize(_FORMS[kind]))
        return GgufArray(key, kind, num_items, content)


def read_header(file: BinaryIO) -> Header:
    """Read the header of a newly opened file.

    Raises ValueError, without the name of the file, if it is damaged or not supported.
    """
    reader = _HeaderReader(file)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = reader.number("I")
    if version not in _VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("its numbers are big-endian" if is_swapped else f"it is of version {version}, not 2 or 3")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise ValueError(f"its header names {num_tensors} tensors and {num_keys} keys of metadata")
    metadata: Metadata = {}
    for _ in range(num_keys):
        key = reader.text(_MAX_NAME)
        if key in metadata:
            raise ValueError(f"it has the key {checks.shown(key)} twice")
        metadata[key] = reader.value(key)
    tensors = [_tensor_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {checks.shown(alignment)}; allowed: 1 to {1 << 20}")
    first = -(-reader.position // alignment) * alignment
    return Header(metadata, tuple(_placed(tensors, first, alignment=alignment, size=reader.size)))


def _tensor_info(reader: _HeaderReader) -> TensorInfo:
    """Read the description of the next tensor. ``begin`` is relative to the first tensor."""
    name = reader.text(_MAX_NAME)
    shown = checks.shown(name)
    num_dimensions = reader.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {shown} has {num_dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))[::-1]  # the file has the innermost first
    number = reader.number("I")
    kind = _TYPES.get(number, f"number {number}")
    if kind not in BLOCKS:
        raise ValueError(f"tensor {shown} is of type {kind}, which is not supported; allowed: {', '.join(BLOCKS)}")
    block_size, block_bytes = BLOCKS[kind]
    if min(shape) < 1 or math.prod(shape) >= 2**48 or shape[-1] % block_size:
        raise ValueError(f"tensor {shown} has shape {list(shape)}, impossible for {kind} with blocks of {block_size}")
    return TensorInfo(name, shape, kind, reader.number("Q"), math.prod(shape) // block_size * block_bytes)


def _placed(tensors: list[TensorInfo], first: int, *, alignment: int, size: int) -> Iterator[TensorInfo]:
    """Yield the tensors in the order of their bytes, with offsets in the file.

    Args:
        first: offset of the first tensor in the file.
        size: bytes of the file.

    Raises ValueError if two tensors have the same name or overlap, or a tensor is not aligned or beyond the file.
    """
    end, seen = 0, set[str]()
    for info in sorted(tensors, key=lambda info: info.begin):
        shown = checks.shown(info.name)
        if info.name in seen:
            raise ValueError(f"it has the tensor {shown} twice")
        if info.begin % alignment or info.begin < end:
            raise ValueError(f"tensor {shown} begins at {info.begin}, which is not aligned or in another tensor")
        end = info.begin + info.num_bytes
        if first + end > size:
            raise ValueError(f"it is truncated: it has {size} bytes, and tensor {shown} ends at {first + end}")
        seen.add(info.name)
        yield replace(info, begin=first + info.begin)
