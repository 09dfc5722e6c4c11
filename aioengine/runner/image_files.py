"""Reads the prepared arrays of an image: a small safetensors file, into memory from which a GPU copies at once.

To map such a file, and to copy it from there into pinned memory, takes several times as long: each page is a fault.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgspec
import torch
from msgspec import Meta

if TYPE_CHECKING:
    from io import FileIO

    from torch import Tensor

_MAX_HEADER_BYTES: Final = 1 << 20
_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_Size = Annotated[int, Meta(ge=0, lt=2**40)]


class _Described(msgspec.Struct):
    """An array, as the header of the file describes it."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def read_arrays(path: str, *, is_pinned: bool) -> dict[str, Tensor]:
    """The arrays [...] in a safetensors file. ``is_pinned``: in pinned memory.

    Raises:
        ValueError: the file cannot be read, or is no such file.
    """
    try:
        with Path(path).open("rb", buffering=0) as file:
            described = _read_header(file)
            return {name: _read_array(file, each, is_pinned=is_pinned) for name, each in described}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, _DamagedError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"its file {path} cannot be read: {reason}"
        raise ValueError(message) from error


class _DamagedError(Exception):
    """The file is no safetensors file, or not all of it."""


def _read_header(file: FileIO) -> list[tuple[str, _Described]]:
    """The arrays in the order of their bytes, the first of which comes next in the file."""
    num_bytes = int.from_bytes(file.read(8), "little")
    if num_bytes > _MAX_HEADER_BYTES:
        _damaged(f"its header has {num_bytes} bytes")
    header = msgspec.json.decode(file.read(num_bytes), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    found = [(name, msgspec.json.decode(raw, type=_Described)) for name, raw in header.items()]
    found.sort(key=lambda item: item[1].data_offsets)
    place = 0
    for name, each in found:
        begin, end = each.data_offsets
        if each.dtype not in _DTYPES:
            _damaged(f"{name} is of type {each.dtype}")
        if begin != place or end - begin != _DTYPES[each.dtype].itemsize * math.prod(each.shape):
            _damaged(f"{name} has shape {list(each.shape)} in the bytes {begin} to {end}")
        place = end
    return found


def _read_array(file: FileIO, described: _Described, *, is_pinned: bool) -> Tensor:
    """The next array [...] of the file."""
    begin, end = described.data_offsets
    memory = torch.empty(end - begin, dtype=torch.uint8, pin_memory=is_pinned)
    left = memory.numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            _damaged(f"it ends {len(left)} bytes too early")
        left = left[count:]
    return memory.view(_DTYPES[described.dtype]).view(described.shape)


def _damaged(reason: str) -> NoReturn:
    raise _DamagedError(reason)
