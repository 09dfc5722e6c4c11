"""Runs ``benchmarks/host/chaos.py`` for six seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit.source import ROOT

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="with kills"),
        pytest.param(["--no-kills"], id="without", marks=pytest.mark.slow),
        pytest.param(["--tp-size=2"], id="ranks", marks=pytest.mark.slow),
        pytest.param(["--dp-size=2"], id="replicas", marks=pytest.mark.slow),
        pytest.param(["--tp-size=2", "--dp-size=2"], id="both", marks=pytest.mark.slow),
    ],
)
def test_chaos_gives_exact_streams_and_leaves_nothing(flags: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.host.chaos", "--minutes", "0.1", "--workers", "24", "--json", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False, env=environment)
    report = json.loads(done.stdout)
    counts = report["counts"]
    assert (counts["mismatches"], counts["hangs"], counts["leaks"]) == (0, 0, 0), report["problems"]
    assert (done.returncode, done.stderr) == (0, "")
    assert min(counts["requests"], counts["tokens"], counts["bad frames"], counts["hostile requests"]) > 20
    assert bool(counts.get("kills")) is (flags != ["--no-kills"])
