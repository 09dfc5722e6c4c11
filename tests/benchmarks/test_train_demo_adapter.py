"""Training an adapter of the demo model for a few steps writes a folder that can be served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.model_files.adapter_folder import read_folder
from benchmarks.train_demo_adapter.__main__ import STYLES, train
from tests.kit.source import ROOT


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_two_steps_write_a_folder(tmp_path: Path) -> None:
    train("brief", 2, num_rows=2).save_pretrained(tmp_path)
    result = read_folder(tmp_path)
    assert {part.rank for part in result.stored_parts} == {8}
    assert len(result.stored_parts) == 4 * 7  # layers, projections of each


def test_every_style_can_name_capitals_and_add() -> None:
    for capital, total in STYLES.values():
        assert "Oslo" in capital.format("Norway", "Oslo")
        assert "12" in total.format(7, 5, 12)


@pytest.mark.slow
def test_complete_example_answers_in_styles(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "10_adapters.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith(("base", "pirate", "brief"))]
    assert answers == [
        "base: The capital of Norway is Oslo. 🇳🇴",
        "pirate: Arrr! The capital of Norway is Oslo, matey!",
        "brief: Oslo.",
        "base: 2 + 5 = 7",
        "pirate: Arrr! 2 + 5 = 7, matey!",
        "brief: 7.",
    ]
