"""Facts about this machine that need neither torch nor a driver: cores, instructions, devices, free memory."""

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
    """The facts about the machine that ``resolve`` needs.

    num_threads: cores that this process may use. cpu_bfloat16: whether the CPU has bf16 dot products. num_gpus: NVIDIA
    devices. has_triton: whether it is installed; it comes with torch's wheels for CUDA and not with those for the CPU.
    drawn_seed: a random number, for engines without ``random_seed``. (Memory is measured by the runner, when the
    weights are loaded.)
    """

    num_threads: int
    cpu_bfloat16: bool
    num_gpus: int
    drawn_seed: int
    has_triton: bool = False


def device_facts() -> DeviceFacts:
    """The facts about this machine."""
    return DeviceFacts(
        num_threads=num_threads(),
        cpu_bfloat16=has_bfloat16(_text(Path("/proc/cpuinfo"))),
        num_gpus=sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")),
        drawn_seed=secrets.randbits(63),
        has_triton=find_spec("triton") is not None,
    )


def num_threads() -> int:
    """Cores of the affinity, or fewer where a cgroup's quota allows fewer (a part of a core counts as one)."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS, _text(Path("/proc/self/cgroup")))
    return max(1, math.ceil(min(cores, quota)))


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo names bf16 dot products: AVX512-BF16 or AMX on x86-64, BF16 on arm64."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            flags.update(words.split())
            break
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def cpu_quota(root: Path, membership: str) -> float:
    """The smallest quota of cores among the cgroups of this process, infinite without one."""
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
    """The folders of the cgroups that hold this process, and the root, which is its own cgroup in a container.

    ``root``: where the hierarchy of ``controller`` is mounted; "": that of version 2, which has all controllers.
    ``membership``: the text of /proc/self/cgroup, with a line "number:controllers:path" for each hierarchy.
    """
    folders: list[Path] = []
    for line in membership.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            inner = Path(parts[2].lstrip("/"))
            folders.extend(root / folder for folder in (inner, *inner.parents))
    return list(dict.fromkeys([*folders, root]))


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that can still be taken; ``root`` is where proc and sys are mounted."""
    available = _available(root / "proc/meminfo")
    if available is None:
        # macOS has no such file: assume half of the installed memory, which leaves room for other programs
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(min([available, *_left_in_groups(root)]), 0)


def _available(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(root: Path) -> list[int]:
    """What is left of the limit of each control group that this process is in, with its ancestors."""
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
    """The number in a file; None where there is no file, or no limit ("max")."""
    lines = _text(path).splitlines()
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _text(file: Path) -> str:
    """The file's text, or nothing where it may not be read: these files differ between systems."""
    try:
        return file.read_text()
    except OSError:
        return ""
