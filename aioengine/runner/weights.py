"""Load checkpoint tensors into the model's parameters.

``load`` does this for a whole model:

1. ``model.weights()`` returns the targets: where each tensor goes. A target may be a part of a fused parameter with
   another dtype.
2. ``checked_entries`` reads the headers of the files, and returns the entries: where each tensor is in the files. The
   names, shapes and dtypes of all entries must match the targets.
3. ``read`` copies or quantizes each tensor into its target, with several threads (``weight_reading``).
4. ``finish`` converts the parameters to the form that the kernels read.
"""

from __future__ import annotations

import ctypes
import gc
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from msgspec.structs import replace

from aioengine.families._block_config import FLOAT_BYTES, TensorSpec
from aioengine.families._config import new_name
from aioengine.kernels import half_linear
from aioengine.kernels.codes import FP8
from aioengine.layers.layer import Target
from aioengine.model_files.checkpoint import (
    Entry,
    check_entries,
    check_unchanged,
    entries_of_file,
    file_states,
    read_headers,
)
from aioengine.model_files.quantization import TEXTS, UNUSED
from aioengine.model_files.tensor_file import dtype_name
from aioengine.models._base import Model
from aioengine.runner.weight_reading import Report, read_all
from aioengine.settings.config import LoadedWeights, Settings

_DUMMY_BLOCK = 1_048_573  # a prime, so that rows of a matrix differ


def load_newest(model: Model, settings: Settings, loaded: LoadedWeights, report: Report) -> int:
    """Do the same as ``load`` for the newest checkpoint of a model: the one of ``loaded``, or else of the settings."""
    path, load_format = (loaded.path, "auto") if loaded.path else (settings.model.path, settings.model.load_format)
    return load(model, Path(path), load_format=load_format, seed=settings.random_seed, report=report)


def load(model: Model, folder: Path, *, load_format: str, seed: int, report: Report) -> int:
    """Fill ``model.weights()`` and finish the model. Return the bytes of the parameters.

    folder: may be a GGUF file. report: called with the bytes read so far and the total.

    Raises:
        ValueError: no usable files, files that change while they are read, or tensors that are missing, unexpected, not
            finite, or have a wrong shape or dtype. The message names them.
    """
    num_bytes = _fill(model, folder, load_format=load_format, seed=seed, report=report)
    finish(model)  # this function has no references to parameters, so converted parameters are freed
    torch.cuda.empty_cache()  # frees memory in which readers converted weights; without a GPU, does nothing
    return num_bytes


def finish(model: Model) -> None:
    """Convert loaded weights to the form that the kernels read, and give freed memory back to the system."""
    model.finish_loading()
    half_linear.finish_packing()
    _trim_heap()


def free_unused_memory() -> None:
    """Give the unused memory that allocators keep for this process back to the system."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    _trim_heap()


def _trim_heap() -> None:
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _fill(model: Model, folder: Path, *, load_format: str, seed: int, report: Report) -> int:
    targets = model.weights()
    if load_format == "dummy":
        fill_dummy(targets, seed=seed)
    else:
        entries = checked_entries(model, folder, targets)
        read(entries, targets, report)
        stored = {entry.name for entry in entries}
        targets = {name: target for name, target in targets.items() if name in stored}
    return sum(target.num_bytes for target in targets.values())


def checked_entries(
    model: Model, path: Path, targets: Mapping[str, Target], *, is_part: bool = False, shown: str = ""
) -> list[Entry]:
    """Return the tensors of a checkpoint, with names, shapes and dtypes that match ``targets``.

    Args:
        path: a folder or a GGUF file; with ``is_part`` a safetensors file.
        is_part: it may have any part of the tensors.
        shown: the name of the checkpoint, for messages; "": the path.

    Raises:
        ValueError: see ``load``.
    """
    entries = entries_of_file(path) if is_part else read_headers(path, model.prefix, model.renamed)
    return matching_entries(model, entries, targets, is_part=is_part, shown=shown or path)


def matching_entries(
    model: Model, entries: list[Entry], targets: Mapping[str, Target], *, is_part: bool, shown: Path | str
) -> list[Entry]:
    """Return the entries of tensors that the model reads. Raises ValueError, see ``checked_entries``."""
    if is_part:
        entries = [_renamed(entry, model, targets) for entry in entries]
    entries = [
        entry
        for entry in entries
        if entry.name in targets or not (model.is_ignored(entry.name) or entry.name.endswith(UNUSED))
    ]
    stored = {entry.name for entry in entries}
    specs = {
        name: TensorSpec(target.shape, _exact_type(target))
        for name, target in targets.items()
        if name in stored or not (target.is_optional or is_part)
    }
    check_entries(entries, specs, shown)
    return entries


def _renamed(entry: Entry, model: Model, targets: Mapping[str, Target]) -> Entry:
    """Return an entry with its name in the model. Its name may lack the prefix of the base model."""
    name = new_name(entry.name, model.renamed)
    full = model.prefix + name
    return replace(entry, name=full if name not in targets and full in targets else name)


def read(entries: list[Entry], targets: Mapping[str, Target], report: Report) -> None:
    """Read the tensors of ``checked_entries`` into their targets."""
    own = {entry.name: targets[entry.name] for entry in entries}
    for entry in entries:
        if entry.name.endswith(TEXTS):  # the rest of a shorter text stays 0
            text = own[entry.name].tensor.zero_()
            own[entry.name] = Target(text[: math.prod(entry.shape)])
    before = file_states(entry.path for entry in entries)
    read_all([replace(entry, shape=own[entry.name].shape) for entry in entries], own, report)
    check_unchanged(before, "while it was read")


def _exact_type(target: Target) -> str:
    """Return the type that the tensor must have in the file; "" for any floating-point type."""
    if target.writer is not None:
        return target.writer.stored
    name = dtype_name(target.tensor)
    return "" if name in FLOAT_BYTES else name


def fill_dummy(targets: dict[str, Target], *, seed: int) -> None:
    """Fill with random weights that depend only on seed, name and shape, scaled to keep activations small."""
    generator = torch.Generator().manual_seed(seed)
    device = next(iter(targets.values())).tensor.device
    block = torch.randn(_DUMMY_BLOCK, generator=generator).to(device)
    codes = torch.randint(256, (_DUMMY_BLOCK,), generator=generator, dtype=torch.uint8).to(device)
    for name, target in targets.items():
        tensor, shape = target.tensor, target.shape
        if target.is_preset:
            continue
        if len(shape) < 2 and not name.endswith("bias"):
            tensor.fill_(1.0)  # weight of a norm
            continue
        is_coded = not tensor.is_floating_point()
        scale = 1.0 if tensor.dtype == FP8 else shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        values = codes if is_coded else block * scale
        size = math.prod(shape) * (tensor.itemsize if is_coded else 1)
        values = values.roll(zlib.crc32(name.encode()) % _DUMMY_BLOCK).repeat(-(-size // _DUMMY_BLOCK))[:size]
        target.write((values.view(tensor.dtype) if is_coded else values).view(shape)[target.index])
