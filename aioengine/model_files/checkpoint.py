"""Reads the headers of checkpoint files, and checks their tensors against a model. Torch-free."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from aioengine.api import checks
from aioengine.families._block_config import DTYPE_BYTES, FLOAT_BYTES, TensorSpec
from aioengine.families._config import Renamed, TransformerConfig, new_name
from aioengine.families._tensors import checkpoint_tensors, is_ignored, plain_tensors
from aioengine.model_files import folder_files
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.model_files.gguf_model import tensors_of
from aioengine.model_files.quantization import TEXTS, UNUSED, Quantization

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_MAX_NAME: Final = 255
"""Maximum length of a file name."""
_FOREIGN_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ggml", ".h5", ".msgpack", ".onnx", ".npz")
"""Weight files that cannot be read."""
_MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""Enough for 100,000 tensors in one file."""
_LENGTH_BYTES: Final = 8
"""A file starts with the length of its header in this many bytes."""
_MAX_PROBLEMS: Final = 8
"""Maximum number of problems in one error message."""


class Entry(Struct, frozen=True):
    """A tensor in a checkpoint file.

    Attributes:
        name: name in the model, with the prefix of the base model.
        stored_name: name in the file.
        begin: offset of its first byte in the file.
        num_heads: see ``gguf_model.tensors_of``.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str
    stored_name: str
    begin: int = 0
    num_heads: int = 0

    @property
    def num_bytes(self) -> int:
        size, num_bytes = BLOCKS.get(self.dtype) or (1, DTYPE_BYTES[self.dtype])
        return math.prod(self.shape) // size * num_bytes


class _WeightIndex(Struct):
    weight_map: dict[str, str]


_Size = Annotated[int, Meta(ge=0, lt=2**60)]


class _TensorHeader(Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


def check_folder(folder: Path, config: TransformerConfig, quantization: Quantization | None = None) -> None:
    """Check that the folder has all tensors of a model, and no others except ignored ones.

    Raises:
        ValueError: a file is missing or damaged, or the tensors do not match the model.
    """
    entries = read_headers(folder, config.prefix, config.renamed)
    check_num_layers(entries, config.num_layers, folder)  # first: a wrong config.json may describe millions of tensors
    specs = checkpoint_tensors(config, plain_tensors if quantization is None else quantization.tensors_of)
    unused = {entry.name for entry in entries if is_ignored(config, entry.name) or entry.name.endswith(UNUSED)}
    check_entries([entry for entry in entries if entry.name in specs or entry.name not in unused], specs, folder)


def check_num_layers(entries: Sized, num_layers: int, folder: Path) -> None:
    """Raise ValueError if there are fewer tensors than layers."""
    if num_layers > len(entries):
        raise ValueError(
            f"the weights in {folder} do not match config.json: they have only "
            f"{checks.counted(len(entries), 'tensor')}, for num_hidden_layers={num_layers}"
        )


def check_entries(entries: list[Entry], specs: Mapping[str, TensorSpec], folder: Path | str) -> None:
    """Raise ValueError for tensors that are missing, unexpected, or have a wrong shape or dtype. folder: shown."""
    names = {entry.name for entry in entries}
    problems = [
        f"{checks.counted(len(wrong), 'tensor')} {problem}: {listed(wrong)}"
        for problem, wrong in (("missing", specs.keys() - names), ("not expected by this model", names - specs.keys()))
        if wrong
    ]
    for entry in entries:
        spec, shown = specs.get(entry.name), checks.name(entry.name)
        floats = BLOCKS if folder_files.is_gguf(entry.path) else FLOAT_BYTES
        allowed = [spec.dtype] if spec is not None and spec.dtype else list(floats)
        if spec is not None and not _has_shape(entry, spec.shape):
            problems.append(f"{shown} has shape {list(entry.shape)}, and the model expects {list(spec.shape)}")
        elif entry.dtype not in allowed:
            problems.append(f"{shown} is of type {checks.name(entry.dtype)}; allowed: {', '.join(allowed)}")
    if problems:
        more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        first = "; ".join(problems[:_MAX_PROBLEMS])
        raise ValueError(f"the weights in {folder} do not match config.json: {first}{more}")


def _has_shape(entry: Entry, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor in a file has the shape of the model.

    Dimensions of size 1 do not matter: scales are stored as [], [1] or [O, 1]. bitsandbytes flattens its tensors, and
    a text may have fewer bytes.
    """
    stored, expected = (tuple(size for size in sizes if size != 1) for sizes in (entry.shape, shape))
    if entry.name.endswith(TEXTS):
        return len(stored) == 1 and stored[0] <= expected[0]
    return stored in (expected, (math.prod(expected),))


def read_headers(folder: Path, prefix: str, renamed: Renamed = ()) -> list[Entry]:
    """Return all tensors of the checkpoint in a folder or GGUF file, file by file.

    Args:
        prefix: of the tensor names of the base model. If no tensor has it, the model was saved without a head, and the
            prefix is added to all names.
        renamed: see ``TransformerConfig``.

    Raises:
        ValueError: the folder has no safetensors files, a file is missing or damaged, or two files have the same
            tensor.
    """
    if folder_files.is_gguf(folder):
        return _entries_of_gguf(folder)
    paths = _paths(folder)
    if not paths:
        raise ValueError(missing_weights(folder))
    entries: dict[str, Entry] = {}
    for path in paths:
        for entry in entries_of_file(path):
            name = new_name(entry.name, renamed)
            if name in entries:
                other = entries[name]
                stored = f"as {checks.shown(other.stored_name)} and {checks.shown(entry.stored_name)}"
                raise ValueError(
                    f"tensor {checks.shown(name)} is in {other.path.name} and in {path.name} of {folder}, {stored}"
                )
            entries[name] = replace(entry, name=name)
    if renamed or any(name.startswith(prefix) for name in entries):
        return list(entries.values())
    return [replace(entry, name=prefix + name) for name, entry in entries.items()]


def _entries_of_gguf(path: Path) -> list[Entry]:
    header, file = folder_files.read_gguf(path)
    file.close()
    try:
        return [
            Entry(name, path, info.shape, info.kind, info.name, info.begin, num_heads)
            for name, (info, num_heads) in tensors_of(header).items()
        ]
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def model_files(folder: Path, *, with_weights: bool) -> list[Path]:
    """Return config.json and the weight files, or the GGUF file."""
    if folder_files.is_gguf(folder):
        return [folder]
    return [folder / folder_files.CONFIG, *(_paths(folder) if with_weights else [])]


def file_states(paths: Iterable[Path]) -> dict[str, str]:
    """Return path -> digest of each file. The digest differs after the file is changed or replaced.

    Raises ValueError if a file was removed or cannot be read.
    """
    states: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        with folder_files.open_existing(path, f"cannot read {path}: it was removed") as file:
            states[str(path)] = file_state(file)
    return states


def check_unchanged(states: Mapping[str, str], since: str = "since the engine was created") -> None:
    """Raise ValueError if the digest of a file has changed. ``since``: the time of ``states``, for the message."""
    for path, state in file_states(map(Path, states)).items():
        if states[path] != state:
            raise ValueError(f"{path} was changed {since}; load the model again when it is complete")


def file_state(file: BinaryIO) -> str:
    """Return a digest of a newly opened file: device, inode, size, modification time, and header.

    For a file in another format than safetensors, the header is the content after 8 bytes, up to 16 MiB.
    """
    stat = os.fstat(file.fileno())
    facts = f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} "
    header = file.read(min(int.from_bytes(file.read(_LENGTH_BYTES), "little"), _MAX_HEADER_BYTES))
    return hashlib.sha256(facts.encode() + header).hexdigest()[:32]


def _paths(folder: Path) -> list[Path]:
    """Return the weight files: the files in the index, or else model.safetensors, or else all safetensors files."""
    path = folder / _INDEX
    index = folder_files.read_json(path, _WeightIndex)
    if index is None:
        single = folder / _SINGLE
        return [single] if folder_files.is_file(single) else sorted(folder.glob("*.safetensors"))
    names = sorted(set(index.weight_map.values()))
    if not names:
        raise ValueError(f"cannot read {path}: it names no files")
    for name in names:
        if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute() or len(name) > _MAX_NAME:
            raise ValueError(f"cannot read {path}: it names {checks.shown(name)}, which is not in the model folder")
    paths = [folder / name for name in names]
    missing = [path.name for path in paths if not folder_files.is_file(path)]
    if missing:
        raise ValueError(f"cannot read {folder}/{listed(missing)}: {_INDEX} names it; fetch the whole model")
    return paths


def missing_weights(folder: Path) -> str | None:
    """Return why a folder has no readable weights; None if it has some, or is a GGUF file."""
    if folder_files.is_gguf(folder) or any(folder.glob("*.safetensors")):
        return None
    foreign = sorted(path.name for path in folder.glob("*") if path.suffix in _FOREIGN_SUFFIXES)
    if not foreign:
        return (
            f"{str(folder)!r} has no weights (*.safetensors or *.gguf). Other formats, such as .bin, are not "
            "downloaded from the hub: convert them with transformers. load_format='dummy' starts an engine with random "
            "weights"
        )
    return (
        f"{str(folder)!r} has its weights in {checks.name(foreign[0])}, which is not read because it may run code. "
        "Convert a model that you trust to safetensors: load it with its class in transformers and dtype='auto', save "
        "it with save_pretrained, and copy its tokenizer files"
    )


def entries_of_file(path: Path) -> list[Entry]:
    """Return the tensors of a safetensors file in the order of their bytes.

    A file consists of the length of the header (8 bytes), a JSON header, and the tensors.

    Raises ValueError if the file is missing or damaged.
    """
    with folder_files.open_existing(path) as file:
        try:
            tensors = _tensor_headers(file)
            size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"cannot read {path}: its header is damaged: {error}") from error
        except ValueError as error:
            raise ValueError(f"cannot read {path}: {error}") from error
    first = size - tensors[-1][1].data_offsets[1] if tensors else size
    return [
        Entry(name, path, tensor.shape, tensor.dtype, name, first + tensor.data_offsets[0]) for name, tensor in tensors
    ]


def _tensor_headers(file: BinaryIO) -> list[tuple[str, _TensorHeader]]:
    """Raises ValueError, without the path, unless the tensors follow one another and fill the rest of the file."""
    size = os.fstat(file.fileno()).st_size
    num_header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if num_header_bytes > _MAX_HEADER_BYTES or size < _LENGTH_BYTES + num_header_bytes:
        raise ValueError(f"it is truncated or no safetensors file ({size} bytes, a header of {num_header_bytes})")
    header = msgspec.json.decode(file.read(num_header_bytes), type=dict[str, msgspec.Raw])
    msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
    tensors = [(name, msgspec.json.decode(raw, type=_TensorHeader)) for name, raw in header.items()]
    tensors.sort(key=lambda item: item[1].data_offsets)
    position = 0
    for name, tensor in tensors:
        begin, end = tensor.data_offsets
        shown = f"its header is damaged: {checks.shown(name)}"
        if begin != position or end < begin:  # a duplicate name leaves a gap, too
            raise ValueError(f"{shown} has the bytes {begin} to {end}, and the previous tensor ends at {position}")
        if tensor.dtype in DTYPE_BYTES and DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape) != end - begin:
            raise ValueError(f"{shown} has shape {list(tensor.shape)} of {tensor.dtype} in {end - begin} bytes")
        position = end
    expected = _LENGTH_BYTES + num_header_bytes + position
    if size != expected:
        state = "truncated" if size < expected else "damaged"
        raise ValueError(f"it is {state}: it has {size} bytes of {expected}; fetch it again")
    return tensors


def listed(names: Iterable[str]) -> str:
    """Return the first five names, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return f"{', '.join(map(checks.name, ordered[:5]))}{more}"
