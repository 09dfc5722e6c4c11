"""Reads tensors of safetensors files into memory of their own, which may be pinned: a GPU copies from there at once.

For small files that are read beside the steps. To map such a file, and to copy it from there into pinned memory, takes
several times as long: each page is a fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from aioengine.model_files import checkpoint, folder_files

if TYPE_CHECKING:
    from typing import BinaryIO

    from torch import Tensor

    from aioengine.model_files.checkpoint import Entry

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
"""Types of tensors by their names in safetensors files."""


def read_tensor(file: BinaryIO, entry: Entry, *, is_pinned: bool = False) -> Tensor:
    """The tensor [*entry.shape] of an open file. ``is_pinned``: in pinned memory. Python's lock is free meanwhile.

    Raises:
        ValueError: it is of another type than those that are read here, or the file was changed meanwhile.
    """
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.path}: {entry.name} is of type {entry.dtype}; what works: {', '.join(DTYPES)}")
    content = torch.empty(entry.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    file.seek(entry.begin)
    if file.readinto(content.numpy()) != entry.num_bytes:  # type: ignore[attr-defined]
        raise ValueError(f"{entry.path} was changed while it was read")
    return content.view(DTYPES[entry.dtype]).view(entry.shape)


def read_arrays(path: str, *, is_pinned: bool) -> dict[str, Tensor]:
    """All tensors [...] of a file, by name.

    Raises:
        ValueError: the file cannot be read, or is no such file.
    """
    entries = checkpoint.entries_of_file(Path(path))
    file = folder_files.open_file(Path(path))
    if file is None:
        raise ValueError(f"cannot read {path}: there is no such file")
    with file:
        return {entry.name: read_tensor(file, entry, is_pinned=is_pinned) for entry in entries}
