"""Checkpoint tensors into the model's parameters.

Safetensors files are mapped, not read: each tensor is copied from the map straight to its place, which may be a part
of a fused parameter of another dtype. A map is let go every 128 MiB, so that a shard never stands in memory a second
time. All names and shapes are checked before the first byte is copied.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from aioengine.models._base import Model

    Report = Callable[[int, int], None]

LOAD_FORMATS = ("auto", "safetensors", "dummy")

_MAP_BYTES = 128 << 20
_INDEX = "model.safetensors.index.json"
_FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz")
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DUMMY_BLOCK = 1_048_573  # a prime: rows of a matrix never repeat one another


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint, as the header of its file describes it."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = _DTYPES[self.dtype]
        for length in self.shape:
            size *= length
        return size


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
        entries = [entry for entry in read_headers(folder) if entry.name in targets or not model.is_ignored(entry.name)]
        _check(entries, targets, folder)
        _copy(entries, targets, report)
    return sum(target.nbytes for target in targets.values())


def read_headers(folder: Path) -> list[Entry]:
    """All tensors of the checkpoint in a folder, file by file.

    Raises:
        ValueError: no safetensors files, a file that is missing or damaged, or a tensor that two files hold.
    """
    index = folder / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(_nothing_usable(folder))
    entries: dict[str, Entry] = {}
    for path in paths:
        for entry in _read_header(path):
            if entry.name in entries:
                message = f"tensor {entry.name!r} is in {entries[entry.name].path.name} and in {path.name} of {folder}"
                raise ValueError(message)
            entries[entry.name] = entry
    return list(entries.values())


def fill_dummy(targets: dict[str, Tensor], *, seed: int) -> None:
    """Random weights that depend on the seed, the name and the shape alone, sized so that activations stay tame."""
    generator = torch.Generator().manual_seed(seed)
    device = next(iter(targets.values())).device
    block = torch.randn(_DUMMY_BLOCK, generator=generator).to(device)
    for name, target in targets.items():
        if target.ndim == 1 and not name.endswith("bias"):
            target.fill_(1.0)  # a norm
            continue
        scale = 0.02 if target.ndim == 1 else target.shape[-1] ** -0.5
        values = block.roll(zlib.crc32(name.encode()) % _DUMMY_BLOCK) * scale
        target.copy_(_repeated(values, target.numel()).view(target.shape))


def _repeated(values: Tensor, size: int) -> Tensor:
    return values.repeat(-(-size // len(values)))[:size]


def _nothing_usable(folder: Path) -> str:
    if not folder.is_dir():
        return f"the model folder {folder} does not exist"
    foreign = sorted(path.name for path in folder.iterdir() if path.suffix in _FOREIGN_SUFFIXES)
    found = f"it has {', '.join(foreign[:3])}, which cannot be read" if foreign else "it has no weights"
    return (
        f"no *.safetensors in the model folder {folder}: {found}. What works: a checkpoint in safetensors "
        "(transformers' save_pretrained writes it), or load_format='dummy' for random weights"
    )


def _read_header(path: Path) -> list[Entry]:
    try:
        with _opened(path) as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return [Entry(name, path, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()]
    except (OSError, SafetensorError) as error:
        message = f"cannot read {path}: {error}"
        raise ValueError(message) from error


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


def _check(entries: list[Entry], targets: dict[str, Tensor], folder: Path) -> None:
    found = {entry.name for entry in entries}
    problems = [
        *_listed("missing", sorted(targets.keys() - found)),
        *_listed("not expected by this model", sorted(found - targets.keys())),
    ]
    for entry in entries:
        target = targets.get(entry.name)
        if target is not None and tuple(target.shape) != entry.shape:
            problems.append(f"{entry.name} has shape {list(entry.shape)}, the model wants {list(target.shape)}")
        elif entry.dtype not in _DTYPES:
            problems.append(f"{entry.name} is of type {entry.dtype}; what works: {', '.join(_DTYPES)}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        message = f"the weights in {folder} do not fit the model: {'; '.join(problems[:8])}{more}"
        raise ValueError(message)


def _listed(what: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        yield f"{len(names)} tensors {what}: {', '.join(names[:5])}{more}"


def _copy(entries: list[Entry], targets: dict[str, Tensor], report: Report) -> None:
    total = sum(entry.num_bytes for entry in entries)
    done = 0
    report(done, total)
    for part in _parts(entries):
        with _opened(part[0].path) as file:
            for entry in part:
                targets[entry.name].copy_(file.get_tensor(entry.name))
                done += entry.num_bytes
                report(done, total)


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
