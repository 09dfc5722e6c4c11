"""Plug-ins load by name, and only the chosen file is imported."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

from aioengine import plugins
from aioengine.scheduler.policies._base import Policy


def test_names_are_the_files_of_the_folder() -> None:
    assert plugins.names("scheduler/policies") == ["fcfs", "longest_prefix", "priority"]


def test_load_returns_the_plugin() -> None:
    assert plugins.load("scheduler/policies", "fcfs") is Policy


def test_unknown_name_is_refused_with_known_names() -> None:
    with pytest.raises(ValueError, match="no plug-in 'fcsf' .did you mean 'fcfs'"):
        plugins.load("scheduler/policies", "fcsf")
    with pytest.raises(ValueError, match=r"no plug-in 'xyz'; allowed: fcfs, longest_prefix, priority"):
        plugins.load("scheduler/policies", "xyz")


@pytest.fixture
def folder_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a good plug-in, a broken plug-in, a shared file, and aliases."""
    import aioengine

    folder = tmp_path / "sample_plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("ALIASES = {'other': '_parts:OTHER', 'best': 'good:PLUGIN'}\n")
    (folder / "_parts.py").write_text("OTHER = 'other'\n")
    (folder / "good.py").write_text("PLUGIN = 'good'\n")
    (folder / "broken.py").write_text("import a_package_that_nobody_has\n")
    (folder / "_shared.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(aioengine, "__path__", [*aioengine.__path__, str(tmp_path)])
    yield "sample_plugins"
    for name in [name for name in sys.modules if name.startswith("aioengine.sample_plugins")]:
        del sys.modules[name]


def test_broken_plugin_does_not_affect_others(folder_of_plugins: str) -> None:
    assert plugins.names(folder_of_plugins) == ["best", "broken", "good", "other"]
    assert plugins.load(folder_of_plugins, "good") == "good"
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        plugins.load(folder_of_plugins, "broken")


def test_aliases_load_from_other_files(folder_of_plugins: str) -> None:
    assert plugins.load(folder_of_plugins, "best") == "good"
    assert plugins.load(folder_of_plugins, "other") == "other"
    with pytest.raises(ValueError, match="allowed: best, broken, good, other"):
        plugins.load(folder_of_plugins, "_parts")


def test_aliases_name_classes_that_exist_and_hide_no_file() -> None:
    for folder in ("families", "media/tokens"):
        package = importlib.import_module(f"aioengine.{folder.replace('/', '.')}")
        files = {file.name for file in pkgutil.iter_modules(package.__path__)}
        assert not files & package.ALIASES.keys()
        assert all(isinstance(plugins.load(folder, name), type) for name in package.ALIASES)
