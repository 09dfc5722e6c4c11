"""Read tensors of safetensors files into memory, which may be pinned: pinned memory allows direct DMA to a GPU.

For small files that are read while steps run. Mapping a file and copying it to pinned memory takes several times as
long, because of page faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import torch

from aioengine.model_files import checkpoint, folder_files

if TYPE_CHECKING:
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
"""dtype name in safetensors files -> torch dtype."""


def read_tensor(file: BinaryIO, entry: Entry, *, is_pinned: bool = False) -> Tensor:
    """Read a tensor [*entry.shape] of an open file. is_pinned: into pinned memory. Releases the GIL.

    Raises:
        ValueError: the dtype is not supported, or the file was changed.
    """
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.path}: {entry.name} is of type {entry.dtype}; what works: {', '.join(DTYPES)}")
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
