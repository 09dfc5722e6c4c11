"""Children import modules from the same places as their parent, including changes of ``sys.path``."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import msgspec
import pytest

from aioengine.child_process.bootstrap import merged
from aioengine.errors import EngineStartupError
from aioengine.supervision.launchers._process_child import import_path
from tests.kit.source import ROOT
from tests.processes.engine_kit import Frontend, fake_settings

PROGRAM = """
import asyncio, sys
{setup}
from tests.processes.engine_kit import FAKE, Frontend, fake_settings

async def main():
    frontend = Frontend(fake_settings(factory={factory!r}))
    facts = await frontend.supervisor.start()
    frontend.submit(1)
    await frontend.finished(1)
    await frontend.supervisor.stop(5.0)
    print(facts.get("came_from", "nowhere"))

asyncio.run(main())
"""
FACTORY = """
from aioengine.testing import fake_runner

class Runner(fake_runner.FakeRunner):
    @property
    def facts(self):
        return {{**super().facts, "came_from": {name!r}}}

def build(settings, report):
    fake_runner.FakeRunner = Runner
    return fake_runner.build(settings, report)
"""
PACKAGES = Path(msgspec.__file__).parents[1]
INSERT = f"sys.path[:0] = [{str(ROOT)!r}, {str(PACKAGES)!r}]"


def run(
    setup: str, *, factory: str = "fake_factory:build", interpreter: str = sys.executable, cwd: Path | None = None,
    **environment: str,
) -> str:  # fmt: skip
    program = PROGRAM.format(setup=setup, factory=factory)
    done = subprocess.run(
        [interpreter, "-c", program],
        cwd=cwd or "/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two modules of the same name."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fake_factory.py").write_text(FACTORY.format(name=name))
    return tmp_path


@pytest.fixture(scope="module")
def bare_interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that only has the standard library."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, symlinks=True, with_pip=False)
    return str(place / "bin" / "python")


@pytest.mark.process
class TestChildren:
    def test_find_packages_that_the_program_alone_finds(self, bare_interpreter: str) -> None:
        factory = "aioengine.testing.fake_runner:build"
        assert run(INSERT, factory=factory, interpreter=bare_interpreter) == "nowhere"

    def test_find_packages_of_the_environment(self, bare_interpreter: str) -> None:
        path = os.pathsep.join([str(ROOT), str(PACKAGES)])
        factory = "aioengine.testing.fake_runner:build"
        assert run("", factory=factory, interpreter=bare_interpreter, PYTHONPATH=path) == "nowhere"

    def test_find_packages_of_pth_files(self, bare_interpreter: str) -> None:
        site = Path(bare_interpreter).parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages"
        (site / "some.pth").write_text(f"{ROOT}\n{PACKAGES}\n")
        try:
            factory = "aioengine.testing.fake_runner:build"
            assert run("", factory=factory, interpreter=bare_interpreter) == "nowhere"
        finally:
            (site / "some.pth").unlink()

    def test_keep_the_order_of_the_program(self, folder: Path) -> None:
        setup = f"{INSERT}\nsys.path.insert(0, {str(folder / 'new')!r})\nsys.path.append({str(folder / 'old')!r})"
        assert run(setup) == "new"
        assert run(setup, PYTHONPATH=str(folder / "old")) == "new"

    def test_find_modules_in_archives(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
            archive.write(folder / "old" / "fake_factory.py", "fake_factory.py")
        assert run(f"{INSERT}\nsys.path.insert(0, {str(folder / 'app.pyz')!r})") == "old"

    def test_take_libraries_before_files_next_to_the_program(self, folder: Path) -> None:
        setup = f"{INSERT}\nsys.path.append({str(folder / 'new')!r})"
        assert run(setup, cwd=folder / "old") == "new"
        assert run(INSERT, cwd=folder / "old") == "old"

    @pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines"])
    def test_find_modules_in_folders_with_odd_names(self, folder: Path, name: bytes) -> None:
        odd = os.path.join(os.fsencode(folder), name)
        os.rename(folder / "new", odd)
        assert run(f"{INSERT}\nimport os\nsys.path.insert(0, os.fsdecode({odd!r}))") == "new"


def test_standard_library_stays_first() -> None:
    library = os.path.dirname(os.__file__)
    own = ["/env", library, f"{library}/lib-dynload", f"{library}/site-packages"]
    parents = ["/inserted", f"{library}/site-packages", library, "/script"]
    assert merged(own, parents) == [
        library, f"{library}/lib-dynload", "/inserted", f"{library}/site-packages", "/script", "/env"
    ]  # fmt: skip


def test_relative_entries_become_absolute_and_the_working_directory_is_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/first", "lib", str(tmp_path), "/second"])
    assert import_path() == ["/first", f"{tmp_path}/lib", "/second", str(tmp_path), str(tmp_path)]
    tmp_path.rmdir()
    assert import_path() == ["/first", str(tmp_path), "/second"]


def test_entries_that_cannot_be_paths_are_ignored_as_python_ignores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [None, b"/bytes", Path("/path"), 5, "/a\0b"]
    monkeypatch.setattr(sys, "path", ["/first", *odd, "/caf\udce9"])
    assert import_path() == ["/first", "/caf\udce9"]


@pytest.mark.parametrize("executable", [None, ""])
async def test_program_without_an_interpreter_is_named(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(EngineStartupError, match=f"sys.executable is {executable!r}; set it to the path"):
        await Frontend(fake_settings()).supervisor.start()
