"""Cores, instructions and free memory from the files of both versions of cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from aioengine.settings import machine

V2 = "0::/app.slice/job\n"
GIB = 1 << 30
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
def test_cpu_quota_is_the_smallest_of_all_cgroups(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float
) -> None:
    assert machine.cpu_quota(write(tmp_path, files), membership) == expected


def test_bfloat16_is_read_from_the_flags() -> None:
    assert machine.has_bfloat16("processor : 0\nflags\t\t: fpu sse avx512_bf16 amx_tile\n")
    assert machine.has_bfloat16("Features\t: fp asimd bf16\n")
    assert not machine.has_bfloat16("model name: bf16\nflags : fpu avx2\n")
    assert not machine.has_bfloat16("")


def test_facts_about_this_machine() -> None:
    facts = machine.device_facts()
    assert 1 <= facts.num_threads <= (os.cpu_count() or 1)
    assert 0 <= facts.drawn_seed < 2**63
    assert facts.drawn_seed != machine.device_facts().drawn_seed


MEMINFO = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


def test_free_memory_without_control_groups(tmp_path: Path) -> None:
    assert machine.free_host_memory(write(tmp_path, MEMINFO)) == 8 * GIB


def test_free_memory_is_limited_by_groups_of_version_2_and_their_ancestors(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/user/box\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 8}\n",
        "sys/fs/cgroup/user/box/memory.max": "max\n",
        "sys/fs/cgroup/user/box/memory.current": f"{GIB}\n",
    }
    assert machine.free_host_memory(write(tmp_path, files)) == GIB + GIB // 2 + GIB // 8


def test_root_is_the_own_group_in_a_container(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/../../docker/abc\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert machine.free_host_memory(write(tmp_path, files)) == GIB


def test_free_memory_is_limited_by_groups_of_version_1(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n1:name=systemd:/y\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {GIB // 4}\ntotal_active_file {GIB // 8}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    assert machine.free_host_memory(write(tmp_path, files)) == GIB + GIB // 4 + GIB // 8


def test_group_above_its_limit_has_no_free_memory(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert machine.free_host_memory(write(tmp_path, files)) == 0


def test_half_of_the_memory_is_free_without_proc(tmp_path: Path) -> None:
    assert machine.free_host_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_this_machine_has_free_memory() -> None:
    assert machine.free_host_memory() > 0


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 4), ("0", 1), ("2, 3", 2), ("GPU-a,GPU-b,GPU-c", 3), ("", 0), ("1,-1,2", 1)]
)
def test_visible_gpus_are_counted(visible: str | None, expected: int) -> None:
    assert machine.num_gpus(4, visible) == expected
