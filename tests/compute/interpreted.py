"""Run programs in processes where Triton uses its interpreter on the CPU, because it is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


def run_interpreted(program: str) -> None:
    """Run a program, and fail with its stderr if it fails. Skips the test if Triton is not installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
