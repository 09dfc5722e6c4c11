"""The benchmark of the core runs, and its figures are plausible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.host.scheduler import measure

ROOT = Path(__file__).parents[2]


def test_each_figure_is_measured_with_its_number_of_rows() -> None:
    figure = measure(8, output=100, depth=1)
    assert (figure.rows, figure.depth) == (8, 1)


def test_the_figures_are_printed_as_json() -> None:
    command = [sys.executable, "-m", "benchmarks.host.scheduler", "--rows", "1", "4", "--output", "40", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [figure["rows"] for figure in json.loads(answer.stdout)["figures"]] == [1, 4]
