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
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from aioengine.api import checks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

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
"""Types of tensors that are read -> the numbers of a block, and its bytes."""

_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""``ggml_type`` -> its name."""

_STRING, _ARRAY = 8, 9
_FORMS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""``gguf_metadata_value_type`` of numbers -> as ``struct`` has them."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
"""Far beyond all models: vocabularies of 260,000 tokens take some 10 MB."""
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS = 65_536, 262_144, 1 << 22
_MAX_NAME, _MAX_DIMENSIONS = 4096, 4
_FIRST_READ: Final = 1 << 20


class Array(Struct, frozen=True):
    """An array of the metadata, whose items are decoded when they are asked for.

    Attributes:
        kind: ``gguf_metadata_value_type`` of the items.
        content: their bytes.
    """

    key: str
    kind: int
    num_items: int
    content: bytes

    @property
    def has_texts(self) -> bool:
        """Whether the items are strings; else they are numbers."""
        return self.kind == _STRING

    def texts(self) -> list[str]:
        """The items, which must be strings. Bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: they are numbers.
        """
        if not self.has_texts:
            raise ValueError(f"{self.key} holds numbers, and should hold strings")
        found: list[str] = []
        place = 0
        for _ in range(self.num_items):
            end = place + 8 + int.from_bytes(self.content[place : place + 8], "little")
            found.append(self.content[place + 8 : end].decode(errors="replace"))
            place = end
        return found

    def numbers(self) -> tuple[float, ...]:
        """The items, which must be numbers. Raises ValueError if they are strings."""
        if self.has_texts:
            raise ValueError(f"{self.key} holds strings, and should hold numbers")
        return struct.unpack(f"<{self.num_items}{_FORMS[self.kind]}", self.content)


class TensorInfo(Struct, frozen=True):
    """A tensor of the file. ``begin``: the place of its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


class Header(Struct, frozen=True):
    """``metadata``: by key. ``tensors``: in the order of their bytes."""

    metadata: dict[str, Scalar | Array]
    tensors: tuple[TensorInfo, ...]


class _Reader:
    """The bytes of a header, read as far as they are needed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._content = b""
        self.place = 0

    def skip(self, num_bytes: int) -> int:
        """Go past the next bytes, which are read; returns where they begin.

        Raises:
            ValueError: the file has not as many, or the header is larger than any can be.
        """
        begin, end = self.place, self.place + num_bytes
        if end > len(self._content):
            self._read_to(end)
        self.place = end
        return begin

    def skip_texts(self, num_texts: int) -> None:
        """Go past the next strings, of which a vocabulary has some 100,000."""
        unpack, content, end = struct.Struct("<Q").unpack_from, self._content, self.place
        for _ in range(num_texts):
            if end + 8 > len(content):
                content = self._read_to(end + 8)
            end += 8 + unpack(content, end)[0]
        self.skip(end - self.place)

    def _read_to(self, end: int) -> bytes:
        """All bytes so far, and those up to ``end`` at least."""
        if end > self._size:
            raise ValueError(f"it is truncated: it has {self._size} bytes, and its header goes on to {end}")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MAX_HEADER_BYTES} bytes")
        self._content += self._file.read(max(end, _FIRST_READ, 2 * len(self._content)) - len(self._content))
        if end > len(self._content):
            raise ValueError("it was changed while it was read")
        return self._content

    def take(self, num_bytes: int) -> bytes:
        begin = self.skip(num_bytes)
        return self._content[begin : self.place]

    def number(self, form: str) -> int:
        found: int = struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]
        return found

    def text(self, max_bytes: int) -> str:
        size = self.number("Q")
        if size > max_bytes:
            raise ValueError(f"it has a name of {size} bytes at {self.place}")
        return self.take(size).decode(errors="replace")

    def size_left(self) -> int:
        return self._size - self.place

    def value(self, key: str) -> Scalar | Array:
        """The next value of the metadata."""
        kind = self.number("I")
        if kind in _FORMS:
            found: bool | float = struct.unpack(f"<{_FORMS[kind]}", self.take(struct.calcsize(_FORMS[kind])))[0]
            return found
        if kind == _STRING:
            return self.text(_MAX_HEADER_BYTES)
        if kind != _ARRAY:
            raise ValueError(f"{checks.shown(key)} has a value of the unknown type {kind}")
        return self._array(key)

    def _array(self, key: str) -> Array:
        kind, num_items = self.number("I"), self.number("Q")
        if kind != _STRING and kind not in _FORMS:
            raise ValueError(f"{checks.shown(key)} is an array of the type {kind}, which is not read")
        if num_items > _MAX_ITEMS:
            raise ValueError(f"{checks.shown(key)} has {num_items} items; at most {_MAX_ITEMS} work")
        if kind != _STRING:
            return Array(key, kind, num_items, self.take(num_items * struct.calcsize(_FORMS[kind])))
        begin = self.place
        self.skip_texts(num_items)
        return Array(key, kind, num_items, self._content[begin : self.place])


def read_header(file: BinaryIO) -> Header:
    """The header of a file that was just opened.

    Raises:
        ValueError: it is no GGUF file that can be read, or damaged; the message says where, and does not name it.
    """
    reader = _Reader(file)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = reader.number("I")
    if version not in _VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError("its numbers are big-endian" if is_swapped else f"it is of version {version}, not 2 or 3")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
        raise ValueError(f"its header names {num_tensors} tensors and {num_keys} keys of metadata")
    metadata: dict[str, Scalar | Array] = {}
    for _ in range(num_keys):
        key = reader.text(_MAX_NAME)
        if key in metadata:
            raise ValueError(f"it has the key {checks.shown(key)} twice")
        metadata[key] = reader.value(key)
    described = [_described(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {checks.shown(alignment)}; what works: 1 to {1 << 20}")
    first = -(-reader.place // alignment) * alignment
    size = reader.place + reader.size_left()
    return Header(metadata, tuple(_placed(described, first, alignment=alignment, size=size)))


def _described(reader: _Reader) -> TensorInfo:
    """The next tensor; ``begin`` counts from the first of all."""
    name = reader.text(_MAX_NAME)
    shown = checks.shown(name)
    num_dimensions = reader.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {shown} has {num_dimensions} dimensions")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))[::-1]  # the file has the innermost first
    number = reader.number("I")
    kind = _TYPES.get(number, f"number {number}")
    if kind not in BLOCKS:
        raise ValueError(f"tensor {shown} is of type {kind}, which is not read; what works: {', '.join(BLOCKS)}")
    block_size, block_bytes = BLOCKS[kind]
    if min(shape) < 1 or math.prod(shape) >= 2**48 or shape[-1] % block_size:
        raise ValueError(f"tensor {shown} has shape {list(shape)} of type {kind}, whose blocks have {block_size}")
    return TensorInfo(name, shape, kind, reader.number("Q"), math.prod(shape) // block_size * block_bytes)


def _placed(described: list[TensorInfo], first: int, *, alignment: int, size: int) -> Iterator[TensorInfo]:
    """The tensors with their places in a file of ``size`` bytes, whose tensors begin at ``first``.

    Raises:
        ValueError: two have one name, or share bytes, or one is not aligned or not in the file.
    """
    end, seen = 0, set[str]()
    for info in sorted(described, key=lambda info: info.begin):
        shown = checks.shown(info.name)
        if info.name in seen:
            raise ValueError(f"it has the tensor {shown} twice")
        if info.begin % alignment or info.begin < end:
            raise ValueError(f"tensor {shown} begins at {info.begin}, which is not aligned or within another one")
        end = info.begin + info.num_bytes
        if first + end > size:
            raise ValueError(f"it is truncated: it has {size} bytes, and tensor {shown} ends at {first + end}")
        seen.add(info.name)
        yield TensorInfo(info.name, info.shape, info.kind, first + info.begin, info.num_bytes)
