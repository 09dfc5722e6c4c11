"""The benchmark programs run, and benchmarks/README.md names every one of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.kit.source import ROOT

BENCHMARKS = ROOT / "benchmarks"
SHORT = {
    "host.engine_start": "--repeat 1 --idle 0.2",
    "host.first_tokens": "--streams 8 --repeats 1 --json",
    "host.streams": "--streams 8 --output 8 --repeats 1",
    "host.wire": "--rows 8 --streams 8",
}
"""Flags for a short run. The other benchmarks have their own tests or take minutes."""


def programs() -> list[str]:
    """Return the names of the benchmarks, such as "host.walk"."""
    folders = [BENCHMARKS / name for name in ("cpu", "gpu", "host")]
    files = [
        file for folder in folders for file in folder.rglob("*.py") if '__name__ == "__main__"' in file.read_text()
    ]
    return sorted(".".join(file.relative_to(BENCHMARKS).with_suffix("").parts) for file in files)


def test_the_page_names_every_program() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    assert sorted(set(re.findall(r"^\| `python -m benchmarks\.([\w.]+)", page, flags=re.MULTILINE))) == programs()


def test_every_program_has_its_usage_in_the_docstring() -> None:
    for name in programs():
        assert f"\n    python -m benchmarks.{name} " in (BENCHMARKS / f"{name.replace('.', '/')}.py").read_text(), name


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param("host.engine_start", marks=pytest.mark.slow), *list(SHORT)[1:]])
def test_a_program_runs(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SHORT[name].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\d", done.stdout)
