"""Checkpoint tensors into the model's parameters.

Safetensors files are mapped, not read: each tensor, or the part of it that is wanted, is copied from the map straight
to its place, which may be a part of a fused parameter of another dtype. A map is let go every 128 MiB, so that a shard
never stands in memory a second time. All names, shapes and types are checked before the first byte is copied.
"""

from __future__ import annotations

import math
import os
import sys
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from aioengine.checkpoint import check_entries, read_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from aioengine.checkpoint import Entry
    from aioengine.layers.placement import Target
    from aioengine.models._base import Model

    Report = Callable[[int, int], None]

LOAD_FORMATS = ("auto", "safetensors", "dummy")

_EXACT_TYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_MAP_BYTES = 128 << 20
_DUMMY_BLOCK = 1_048_573  # a prime: rows of a matrix never repeat one another


def load(model: Model, folder: Path, *, load_format: str, seed: int, report: Report) -> int:
    """Fill ``model.weights()`` and finish the model; gives the bytes of the parameters.

    ``report`` is called with the bytes read so far and in all.

    Raises:
        ValueError: no usable files, or tensors that are missing, unexpected, of another shape or of a quantized type;
            the message names them.
    """
    if load_format not in LOAD_FORMATS:
        message = f"load_format {load_format!r} is not known; what works: {', '.join(LOAD_FORMATS)}"
        raise ValueError(message)
    num_bytes = _fill(model, folder, load_format=load_format, seed=seed, report=report)
    model.finish_loading()  # nothing refers to the parameters by now: it can let go of what it brings into another form
    return num_bytes


def _fill(model: Model, folder: Path, *, load_format: str, seed: int, report: Report) -> int:
    targets = model.weights()
    if load_format == "dummy":
        fill_dummy(targets, seed=seed)
    else:
        entries = [
            entry
            for entry in read_headers(folder, model.prefix, model.renamed)
            if entry.name in targets or not model.is_ignored(entry.name)
        ]
        shapes = {name: target.shape for name, target in targets.items()}
        check_entries(entries, shapes, folder, types=_exact_types(targets))
        _copy(entries, targets, report)
    return sum(target.tensor.nbytes for target in targets.values())


def _exact_types(targets: dict[str, Target]) -> dict[str, str]:
    """The type, as safetensors names it, of the tensors that no other type can be converted to."""
    return {
        name: _EXACT_TYPES[kind] for name, target in targets.items() if (kind := target.tensor.dtype) in _EXACT_TYPES
    }


def fill_dummy(targets: dict[str, Target], *, seed: int) -> None:
    """Random weights that depend on the seed, the name and the shape alone, sized so that activations stay tame."""
    generator = torch.Generator().manual_seed(seed)
    device = next(iter(targets.values())).tensor.device
    block = torch.randn(_DUMMY_BLOCK, generator=generator).to(device)
    for name, target in targets.items():
        shape = target.shape
        if len(shape) == 1 and not name.endswith("bias"):
            target.tensor.fill_(1.0)  # a norm
            continue
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        values = block.roll(zlib.crc32(name.encode()) % _DUMMY_BLOCK) * scale
        target.tensor.copy_(_repeated(values, math.prod(shape)).view(shape)[target.index])


def _repeated(values: Tensor, size: int) -> Tensor:
    """values [X], repeated to [size]."""
    return values.repeat(-(-size // len(values)))[:size]


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """The file. safetensors takes paths in UTF-8 alone; Linux has another name for every file that is open."""
    if str(path).isascii() or sys.platform != "linux":
        with safe_open(path, framework="pt") as file:
            yield file
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with safe_open(f"/proc/self/fd/{fd}", framework="pt") as file:
            yield file
    finally:
        os.close(fd)


def _copy(entries: list[Entry], targets: dict[str, Target], report: Report) -> None:
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    report(done, total)
    for part in _parts(entries):
        with _opened(part[0].path) as file:
            for entry in part:
                target = targets[entry.name]
                target.tensor.copy_(_read(file, entry.stored_name, target))
                done += entry.num_bytes
                report(done, total)


def _read(file: safe_open, name: str, target: Target) -> Tensor:
    """The tensor of this name, or the slice of it that the target takes, in the target's shape [...]."""
    if target.source is None:
        return file.get_tensor(name)
    part: Tensor = file.get_slice(name)[target.index]
    return part


def _parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Runs of entries of one file that are read through one map."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        if part and (entry.path != part[0].path or size + entry.num_bytes > _MAP_BYTES):
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.num_bytes
    if part:
        yield part
