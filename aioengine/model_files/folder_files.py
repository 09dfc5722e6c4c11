"""Reads the JSON files of a model folder, and the tokens in them. Errors are ValueErrors that name the file.

A GGUF file acts as a folder with the JSON files that its header describes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, TypeVar, cast

import msgspec

from aioengine.api import checks
from aioengine.model_files.gguf_header import Header, read_header
from aioengine.model_files.gguf_model import config_of
from aioengine.model_files.gguf_tokenizer import has_tokenizer, tokenizer_config_of, tokenizer_of

Json: TypeAlias = dict[str, Any]
File = TypeVar("File")

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
_GGUF_PARTS: Final = {CONFIG: "config", TOKENIZER: "tokenizer", TOKENIZER_CONFIG: "tokenizer config"}
"""The files in a GGUF file acting as a folder -> their names in messages."""
MAX_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of a file other than tokenizer.json. The largest known is an index of 100,000 tensors with 10 MB."""
MAX_TOKENIZER_BYTES: Final = 512 * 1024 * 1024
GGUF: Final = ".gguf"
MAX_PATH: Final = 4096
"""Maximum length of a path in an error message. Linux has no longer paths."""

_NO_NUMBER: Final = re.compile(rb'"\w+"\s*:\s*-?(?:NaN|Infinity|[\d.]+[eE]\+?\d{3,})')
"""A field that is no JSON or too large for a float. Python's ``json`` writes and reads such values."""

_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"


class _DescribedToken(msgspec.Struct):
    """An entry of ``added_tokens_decoder``."""

    content: str
    single_word: bool | msgspec.UnsetType = msgspec.UNSET
    lstrip: bool | msgspec.UnsetType = msgspec.UNSET
    rstrip: bool | msgspec.UnsetType = msgspec.UNSET
    normalized: bool | msgspec.UnsetType = msgspec.UNSET
    special: bool | msgspec.UnsetType = msgspec.UNSET


# ---------------------------------------------------------------- reading


def open_file(path: Path) -> BinaryIO | None:
    """Open a file for reading. Returns None if it does not exist. Pipes and devices are not opened: they may block.

    Raises ValueError if it is not a regular file, cannot be read, or is a Git LFS pointer.
    """
    try:
        mode = path.stat().st_mode
        file = path.open("rb") if stat.S_ISREG(mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise _unreadable(path, error) from error
    if file is None:
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise ValueError(f"{shown_path(path)} is {kind}, not a file")
    try:
        is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        file.seek(0)
    except OSError as error:
        file.close()
        raise _unreadable(path, error) from error
    if is_pointer:
        file.close()
        raise ValueError(f"{shown_path(path)} is a Git LFS pointer, not the file: run `git lfs pull` in its folder")
    return file


def open_existing(path: Path, missing: str = "") -> BinaryIO:
    """Open a file as ``open_file``. If it does not exist, raises ValueError with the message ``missing``."""
    file = open_file(path)
    if file is None:
        raise ValueError(missing or f"cannot read {path}: there is no such file")
    return file


def is_file(path: Path) -> bool:
    """Return whether a file exists and can be opened. Raises ValueError as ``open_file``."""
    if is_gguf(path.parent) and path.name in _GGUF_PARTS:
        header, file = read_gguf(path.parent)
        file.close()
        return path.name != TOKENIZER or has_tokenizer(header)
    opened = open_file(path)
    if opened is not None:
        opened.close()
    return opened is not None


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Return the contents of a file; None if it does not exist. Raises ValueError if it exceeds ``max_bytes``."""
    if is_gguf(path.parent):
        return _in_gguf(path)
    file = open_file(path)
    if file is None:
        return None
    try:
        with file:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > max_bytes else file.read(max_bytes + 1)  # files of /proc have size 0
    except OSError as error:
        raise _unreadable(path, error) from error
    if max(size, len(content)) > max_bytes:
        raise _unreadable(path, f"it has more than {max_bytes} bytes")
    return content


def is_gguf(path: Path) -> bool:
    """Return whether the path names a GGUF file."""
    return path.suffix == GGUF and not path.is_dir()


def read_gguf(path: Path) -> tuple[Header, BinaryIO]:
    """Return the header of a GGUF file, and the open file.

    Raises ValueError if the file does not exist or cannot be read.
    """
    file = open_existing(path)
    try:
        return read_header(file), file
    except (OSError, ValueError) as error:
        file.close()
        raise _unreadable(path, error) from error


def _in_gguf(path: Path) -> bytes | None:
    """Return the contents of a JSON file in a GGUF file, which is its parent; None if there is no such file."""
    if path.name not in _GGUF_PARTS:
        return None
    header, file = read_gguf(path.parent)
    try:
        with file:
            if path.name == CONFIG:
                return msgspec.json.encode(config_of(header, file))
            if path.name == TOKENIZER_CONFIG:
                return msgspec.json.encode(tokenizer_config_of(header))
            return msgspec.json.encode(tokenizer_of(header)) if has_tokenizer(header) else None
    except (OSError, ValueError) as error:
        raise _unreadable(path.parent, error) from error


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str | None:
    """Return the text of a file; None if it does not exist."""
    content = read_bytes(path, max_bytes)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from error


def read_json(path: Path, form: type[File], max_bytes: int = MAX_BYTES) -> File | None:
    """Decode a JSON file into type ``form``. Returns None if it does not exist."""
    content = read_bytes(path, max_bytes)
    return None if content is None else decode_json(path, content, form)


def decode_json(path: Path, content: bytes, form: type[File]) -> File:
    """Decode the contents of a JSON file into type ``form``."""
    try:
        return msgspec.json.decode(content, type=form)
    except RecursionError as error:
        raise _unreadable(path, "it is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason, found = str(error), _NO_NUMBER.search(content)
        if found is not None:
            reason = f"{found[0].decode()} is no finite number ({reason})"
        raise _unreadable(path, checks.cut(reason)) from error


def _unreadable(path: Path, reason: Exception | str) -> ValueError:
    text = reason.strerror if isinstance(reason, OSError) else reason
    return ValueError(f"{shown_path(path)} cannot be read: {text}")


def shown_path(path: Path) -> str:
    """Return a path for messages. For a file in a GGUF file, name that part."""
    if path.name in _GGUF_PARTS and is_gguf(path.parent):
        return f"the {_GGUF_PARTS[path.name]} in {shown_path(path.parent)}"
    text = str(path)
    return repr(text) if len(text) <= MAX_PATH else f"{text[:80]!r}... ({len(text)} characters)"


def read_object(path: Path) -> Json:
    """Return the object in a JSON file; {} if there is no file."""
    return read_json(path, dict[str, Any]) or {}


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw


def read_tokenizer(path: Path) -> bytes | None:
    """Return the contents of a tokenizer.json; None if there is no such file.

    Raises ValueError if it is too large, is not JSON, or has no model. The tokenizers library makes further checks.
    """
    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    if content is not None:
        decode_json(path, content, _TokenizerFile)
    return content


# ---------------------------------------------------------------- tokens outside tokenizer.json


def named_tokens(config: Json, older: Json) -> dict[str, str]:
    """Return name -> text of each ``..._token`` in tokenizer_config.json and special_tokens_map.json (``older``).

    The older file is only used if the newer one does not describe its tokens.
    """
    extra = config.get("extra_special_tokens")
    texts: dict[str, str] = {}
    for source in (
        config,
        {} if "added_tokens_decoder" in config else older,
        cast("Json", extra) if isinstance(extra, dict) else {},
    ):
        for name, token in source.items():
            content = _content(token)
            if name.endswith("_token") and content:
                texts[name] = content
    return texts


def described_tokens(config: Json, folder: Path) -> list[tuple[str, dict[str, bool]]]:
    """Return text and flags of the entries of ``added_tokens_decoder``, ordered by id.

    Raises ValueError unless an entry has the form {"id": {"content": text, "special": true, ...}}.
    """
    try:
        described = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, _DescribedToken], str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"added_tokens_decoder in {shown_path(folder / TOKENIZER_CONFIG)}: {error}") from error
    tokens: list[Json] = [msgspec.to_builtins(token) for _, token in sorted(described.items())]  # without unset flags
    return [(token.pop("content"), token) for token in tokens]


def special_tokens(config: Json, named: Mapping[str, str]) -> list[str]:
    """Return the texts of all special tokens without duplicates: named tokens first, then tokens in lists."""
    texts = list(named.values())
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        if isinstance(listed, list):
            texts += [content for token in cast("list[object]", listed) if (content := _content(token))]
    return list(dict.fromkeys(texts))


def added_texts(folder: Path) -> list[str]:
    """Return the texts of all tokens that the config files add or describe, in the order of their addition.

    Raises ValueError if one of the files cannot be read.
    """
    config = read_object(folder / TOKENIZER_CONFIG)
    named = named_tokens(config, read_object(folder / SPECIAL_TOKENS))
    return list(
        dict.fromkeys([*(text for text, _ in described_tokens(config, folder)), *special_tokens(config, named)])
    )


def _content(token: object) -> str | None:
    """Return the text of a token in a config file, which is a string or an object with flags; None otherwise."""
    if isinstance(token, Mapping):
        token = cast("Mapping[str, object]", token).get("content")
    return token if isinstance(token, str) else None
