"""Run programs with Triton kernels in other processes, without a GPU: in Triton's interpreter, or only compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

INTERPRETED = """
import torch
from aioengine.kernels.triton import launcher
torch.cuda.get_device_capability = lambda: (8, 0)  # without Gluon's kernels, which cannot be interpreted
launcher.has_dependent_launch = lambda: False  # even on a machine with a GPU; read when the kernels are imported
launcher.KernelLauncher.__call__ = lambda self, grid, key, arguments, options: self._kernel[grid](*arguments)
"""
COMPILED = """
from aioengine.kernels.triton import launcher
launcher.has_dependent_launch = lambda: True  # read when the kernels are imported
from tests.compute.compiled import compile_for_hopper
launcher.KernelLauncher.__call__ = compile_for_hopper
"""


def run_interpreted(program: str) -> None:
    """Run a program whose kernels run in Triton's interpreter, on the CPU. Triton chooses it when it is imported."""
    _run(INTERPRETED + program, TRITON_INTERPRET="1")


def run_compiled(program: str) -> None:
    """Run a program whose kernels are compiled for Hopper instead of launched."""
    _run(COMPILED + program)


def _run(program: str, **variables: str) -> None:
    """Run a program, and fail with its stderr if it fails. Skips the test if Triton is not installed."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, **variables}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
