"""The benchmarks of the pure parts run, and their figures are plausible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.host.routing import simulate
from benchmarks.host.scheduler import measure

ROOT = Path(__file__).parents[2]


def test_each_figure_is_measured_with_its_number_of_rows() -> None:
    figure = measure(8, output=100, depth=1)
    assert (figure.rows, figure.depth) == (8, 1)


def test_the_figures_are_printed_as_json() -> None:
    command = [sys.executable, "-m", "benchmarks.host.scheduler", "--rows", "1", "4", "--output", "40", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [figure["rows"] for figure in json.loads(answer.stdout)["figures"]] == [1, 4]


def test_routing_by_prefix_finds_more_tokens_in_the_caches_than_other_methods() -> None:
    cached = {
        method: simulate(4, method, 60, load=0.8)["cached"] for method in ("auto", "round_robin", "shortest_queue")
    }
    assert cached["auto"] > 1.3 * max(cached["round_robin"], cached["shortest_queue"])
