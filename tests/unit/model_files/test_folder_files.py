"""Unusual files in a model folder raise a ValueError that names the file, without blocking or reading much."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aioengine.api.args import engine_config
from aioengine.model_files import folder_files
from aioengine.model_files.model_folder import locate
from aioengine.tokenization.chat_template import MAX_TEMPLATE_BYTES, checked_template


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the names of sockets are short
        server.bind(path.name)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


OBJECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe, socket or device, not a file"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe, socket or device, not a file"),
    "empty device": (lambda path: path.symlink_to("/dev/null"), "is a pipe, socket or device, not a file"),
    "folder": (Path.mkdir, "is a folder, not a file"),
    "socket": (make_socket, "is a pipe, socket or device, not a file"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "large file": (make_large, "cannot be read: it has more than [0-9]* bytes"),
    "file without an end": (lambda path: path.symlink_to("/proc/self/pagemap"), "cannot be read"),
    "memory": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: Input/output error"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_special_files_are_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, (make, message) = tmp_path / "it.json", OBJECTS[kind]
    make(path)
    reads = [folder_files.read_bytes, folder_files.read_text, folder_files.read_object]
    for read in (*reads, lambda _: checked_template(str(path))):
        with pytest.raises(ValueError, match=f"{path}' {message}"):
            read(path)


def test_largest_template_is_read(tmp_path: Path) -> None:
    file = tmp_path / "it.jinja"
    file.write_text("x" * MAX_TEMPLATE_BYTES)
    assert len(checked_template(str(file))) == MAX_TEMPLATE_BYTES
    file.write_text("x" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ValueError, match=f"it has more than {MAX_TEMPLATE_BYTES} bytes"):
        checked_template(str(file))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("NaN", r'"rms_norm_eps": NaN is no finite number \(.* \(byte [0-9]*\)\)'),
        ("-Infinity", '"rms_norm_eps": -Infinity is no finite number'),
        ("[0, Infinity]", r"invalid character \(byte [0-9]*\)"),
        ("1e999", '"rms_norm_eps": 1e999 is no finite number .Number out of range'),
        ("9" * 5000, "Integer value out of range"),
        ("[" * 100_000, "Input data was truncated|it is nested too deeply"),
    ],
)
def test_values_outside_of_json_are_refused(value: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(f'{{"hidden_size": 1, "rms_norm_eps": {value}, "vocab_size": 1}}')
    with pytest.raises(ValueError, match=message) as caught:
        folder_files.read_object(file)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("~nosuchuser/model", "'~nosuchuser/model' cannot be looked up: Could not determine home directory"),
        ("x" * 5000, "'xxx.* cannot be looked up: File name too long"),
        ("/" + "x" * 300, "'/xxx.* cannot be looked up: File name too long"),
        ("x/" * 3000, "'x/x/.* cannot be looked up: File name too long"),
        ("a\ud800b", r"'a\\ud800b' cannot be looked up"),
        ("/a\0b", r"'/a\\x00b': there is no such folder"),
    ],
)
@pytest.mark.parametrize("argument", ["model_path", "tokenizer_path"])
def test_errors_show_folder_names_that_are_not_utf_8(name: str, message: str, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} {message}") as caught:
        locate(name, argument=argument)
    assert len(str(caught.value)) < 300


def test_errors_show_cache_names_that_are_not_utf_8() -> None:
    with pytest.raises(ValueError, match="download_dir '~nosuchuser' cannot be looked up"):
        locate("owner/model", download_dir="~nosuchuser")
    for argument in ("model_path", "tokenizer_path", "download_dir"):
        with pytest.raises(ValueError, match=f"{argument} must be .* no null character, got"):
            engine_config(None, {argument: "a\0b"})


@pytest.mark.parametrize("name", ["~nosuchuser/it.jinja", "x" * 5000, "a\0b", "a\ud800b", "missing.jinja", ""])
def test_errors_show_template_names_that_are_not_utf_8(name: str) -> None:
    with pytest.raises(ValueError, match="chat_template(=|: )['\"].* (cannot be read|is a folder)") as caught:
        checked_template(name)
    assert len(str(caught.value)) < 400
