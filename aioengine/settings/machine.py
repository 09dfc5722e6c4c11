"""Reads facts about this machine without torch or a driver: cores, instructions, devices, free memory."""

from __future__ import annotations

import math
import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from msgspec import Struct

_CGROUPS: Final = Path("/sys/fs/cgroup")


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """The facts about the machine that ``resolve`` needs. The runner measures free memory after loading the weights.

    Attributes:
        num_threads: cores that this process may use.
        cpu_bfloat16: the CPU has bf16 dot products.
        num_gpus: number of NVIDIA devices.
        drawn_seed: a random number for engines without ``random_seed``.
        has_triton: Triton is installed. It comes with torch's CUDA wheels, not with the CPU wheels.
    """

    num_threads: int
    cpu_bfloat16: bool
    num_gpus: int
    drawn_seed: int
    has_triton: bool = False


def device_facts() -> DeviceFacts:
    """Return the facts about this machine."""
    return DeviceFacts(
        num_threads=num_threads(),
        cpu_bfloat16=has_bfloat16(_text(Path("/proc/cpuinfo"))),
        num_gpus=sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")),
        drawn_seed=secrets.randbits(63),
        has_triton=find_spec("triton") is not None,
    )


def num_threads() -> int:
    """Return the cores of the affinity mask, limited by the CPU quota of cgroups (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS, _text(Path("/proc/self/cgroup")))
    return max(1, math.ceil(min(cores, quota)))


def has_bfloat16(cpuinfo: str) -> bool:
    """Return whether /proc/cpuinfo lists bf16 dot products: AVX512-BF16 or AMX on x86-64, BF16 on arm64."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
    return False


def cpu_quota(root: Path, membership: str) -> float:
    """Return the smallest quota of cores among the cgroups of this process; infinity without a quota."""
    quotas = [math.inf]
    for folder in cgroup_folders(root, membership, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            quotas.append(int(quota) / int(period))
    for folder in cgroup_folders(root / "cpu", membership, "cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas)


def cgroup_folders(root: Path, membership: str, controller: str) -> list[Path]:
    """Return the folders of the cgroups of this process and their ancestors, and the root.

    In a container, the root is the process's own cgroup.

    Args:
        root: mount point of the hierarchy of ``controller``.
        membership: the text of /proc/self/cgroup, with one line "number:controllers:path" per hierarchy.
        controller: "" for version 2, which has one hierarchy for all controllers.
    """
    folders: list[Path] = []
    for line in membership.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            inner = Path(parts[2].lstrip("/"))
            folders.extend(root / folder for folder in (inner, *inner.parents))
    return list(dict.fromkeys([*folders, root]))


def free_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are available.

    The limits of control groups (version 1 and 2, with all ancestors) apply. File pages that the kernel can drop count
    as free. ``root``: the folder with proc and sys.
    """
    available = _available(root / "proc/meminfo")
    if available is None:
        # macOS has no such file: assume half of the installed memory, and leave the rest to other programs
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(min([available, *_left_in_groups(root)]), 0)


def _available(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(root: Path) -> list[int]:
    """Return the unused bytes of each memory limit of the control groups of this process."""
    membership = _text(root / "proc/self/cgroup")
    version_2 = "memory.max", "memory.current", "inactive_file"
    version_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    left: list[int | None] = []
    for controller, names in (("", version_2), ("memory", version_1)):
        folders = cgroup_folders(root / "sys/fs/cgroup" / controller, membership, controller)
        left += [_left(folder, *names) for folder in folders]
    return [size for size in left if size is not None]


def _left(group: Path, limit_name: str, usage_name: str, droppable_name: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None:
        return None
    droppable = 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == droppable_name:
            droppable = int(value)
    return limit - usage + droppable


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or says "max"."""
    lines = _text(path).splitlines()
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _text(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read. These files differ between systems."""
    try:
        return file.read_text()
    except OSError:
        return ""
