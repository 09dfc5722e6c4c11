"""Endpoints are short enough and unique. Files of dead engines are removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.transport import addresses
from aioengine.transport.addresses import PrivateDirectory


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(addresses.zmq, "IPC_PATH_MAX_LEN", 1000)
    return tmp_path


def test_directory_is_private_and_is_removed(base: Path) -> None:
    first, second = PrivateDirectory(), PrivateDirectory()
    assert Path(first.path).parent == base
    assert first.path != second.path
    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
    (Path(first.path) / "log").write_text("x")
    first.remove()
    first.remove()
    assert [entry.name for entry in base.iterdir()] == [Path(second.path).name]
    second.remove()


def test_directories_of_dead_engines_are_removed(base: Path) -> None:
    code = "from aioengine.transport.addresses import PrivateDirectory as P; print(P().path, flush=True); input()"
    root = str(Path(addresses.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert child.stdin is not None
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    for name in ("scheduler.board", "scheduler.log", "ranks"):
        (path / name).touch()
    for _ in range(2):
        PrivateDirectory().remove()
        assert path.is_dir()
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    PrivateDirectory().remove()
    assert list(base.iterdir()) == []


def test_start_removes_the_images_of_dead_engines(
    base: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, temporary = (tmp_path_factory.mktemp(name) for name in ("shared", "temporary"))
    monkeypatch.setattr(addresses, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(addresses.tempfile, "tempdir", str(temporary))
    living, dead = ([PrivateDirectory(str(place)) for place in (shared, temporary)] for _ in range(2))
    for directory in (*living, *dead):
        (Path(directory.path) / "image0.media").write_bytes(b"pixels")
    for directory in dead:
        os.close(directory._lock)  # the system does this when the process ends
    PrivateDirectory().remove()
    assert [[str(path) for path in place.iterdir()] for place in (shared, temporary)] == [
        [directory.path] for directory in living
    ]
    for directory in living:
        assert (Path(directory.path) / "image0.media").read_bytes() == b"pixels"
        directory.remove()
    monkeypatch.setattr(addresses, "SHARED_MEMORY", str(shared / "absent"))
    PrivateDirectory().remove()


def test_files_of_other_programs_are_kept(base: Path) -> None:
    (base / "aioengine-file").write_text("x")
    (base / "aioengine-open").mkdir(mode=0o755)
    (base / "aioengine-link").symlink_to(base / "aioengine-open")
    (base / "other").mkdir(mode=0o700)
    (base / "aioengine-work").mkdir(mode=0o700)  # a folder of a user
    kept = base / "aioengine-0123456789ab"
    kept.mkdir(mode=0o700)
    (kept / "answers.jsonl").write_text("x")
    PrivateDirectory().remove()
    assert len(list(base.iterdir())) == 6


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
@pytest.mark.parametrize("value", ["x" * 120, "", "not/absolute", "/nowhere/at/all"])
def test_directories_that_cannot_hold_a_socket_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if len(value) > 100:
        (tmp_path / value).mkdir()
        value = str(tmp_path / value)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(addresses.tempfile, "tempdir", None)
    directory = PrivateDirectory()
    assert len(directory.path) < 40
    directory.remove()


def test_error_without_a_writable_directory_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.os, "access", lambda *_: False)
    with pytest.raises(OSError, match="can be written to; set TMPDIR"):
        PrivateDirectory()


def test_lock_is_not_inherited_by_started_programs(base: Path) -> None:
    directory = PrivateDirectory()
    assert not os.get_inheritable(directory._lock)
    directory.remove()
