"""Cores and instructions from the files of both versions of cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from aioengine.settings import machine

V2 = "0::/app.slice/job\n"
V1 = "4:cpu,cpuacct:/job\n7:memory:/job\n1:name=systemd:/x\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, V2, math.inf),
        ({"cpu.max": "max 100000\n"}, V2, math.inf),
        ({"cpu.max": "150000 100000\n"}, V2, 1.5),
        ({"app.slice/job/cpu.max": "400000 100000\n", "app.slice/cpu.max": "200000 100000\n"}, V2, 2),
        ({"app.slice/other/cpu.max": "100000 100000\n"}, V2, math.inf),
        ({"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, V1, math.inf),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, V1, 3),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", 3),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], membership: str, expected: float) -> None:
    assert machine.cpu_quota(write(tmp_path, files), membership) == expected


def test_bfloat16_is_read_from_the_flags() -> None:
    assert machine.has_bfloat16("processor : 0\nflags\t\t: fpu sse avx512_bf16 amx_tile\n")
    assert machine.has_bfloat16("Features\t: fp asimd bf16\n")
    assert not machine.has_bfloat16("model name: bf16\nflags : fpu avx2\n")
    assert not machine.has_bfloat16("")


def test_this_machine() -> None:
    facts = machine.device_facts()
    assert 1 <= facts.num_threads <= (os.cpu_count() or 1)
    assert 0 <= facts.drawn_seed < 2**63
    assert facts.drawn_seed != machine.device_facts().drawn_seed
