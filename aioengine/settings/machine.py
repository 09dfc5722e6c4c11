"""Reads facts about this machine without torch or a driver: cores, instructions, devices, free memory."""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Final

from msgspec import Struct

_CGROUPS: Final = Path("/sys/fs/cgroup")


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """The facts about the machine that ``resolve`` needs. The runner measures free memory after loading the weights.

    Attributes:
        num_threads: cores that this process may use.
        cpu_bfloat16: the CPU has bf16 dot products.
        num_gpus: number of NVIDIA devices that this process may use.
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
        num_gpus=num_gpus(sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")),
        drawn_seed=secrets.randbits(63),
        has_triton=find_spec("triton") is not None,
    )


def num_gpus(num_devices: int, visible: str | None) -> int:
    """Return the number of GPUs that CUDA may use.

    visible: CUDA_VISIBLE_DEVICES, a list that ends before its first negative index; None: it is not set.
    """
    if visible is None:
        return num_devices
    names = [name.strip() for name in visible.split(",")]
    return min(num_devices, sum(1 for _ in takewhile(lambda name: name and not name.startswith("-"), names)))


def num_threads() -> int:
    """Return the cores of the affinity mask, limited by the CPU quota of cgroups (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(_CGROUPS, _text(Path("/proc/self/cgroup")))
    return max(1, math.ceil(min(cores, quota)))


def has_bfloat16(cpuinfo: str) -> bool:
    """Return whether /proc/cpuinfo lists bf16 dot products: AVX512-BF16 or AMX on x86-64, BF16 on arm64."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())


def cpu_quota(root: Path, membership: str) -> float:
    """Return the smallest quota of cores among the cgroups of this process; infinity without a quota."""
    limits = [_text(folder / "cpu.max") for folder in cgroup_folders(root, membership, "")]
    limits += [
        f"{_text(folder / 'cpu.cfs_quota_us').strip()} {_text(folder / 'cpu.cfs_period_us')}"
        for folder in cgroup_folders(root / "cpu", membership, "cpu")
    ]
    pairs = [re.fullmatch(r"(\d+) (\d+)\s*", limit) for limit in limits]
    return min([math.inf, *(int(pair[1]) / int(pair[2]) for pair in pairs if pair is not None)])


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
    kibibytes = _number("MemAvailable:", root / "proc/meminfo")
    # macOS has no such file: assume half of the installed memory, and leave the rest to other programs
    left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if kibibytes is None else kibibytes * 1024
    membership = _text(root / "proc/self/cgroup")
    for controller, limit_file, usage_file, prefix in (
        ("", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in cgroup_folders(root / "sys/fs/cgroup" / controller, membership, controller):
            limit, usage = _number("", folder / limit_file), _number("", folder / usage_file)
            if limit is not None and usage is not None:
                lists = (f"{prefix}{kind}_file" for kind in ("inactive", "active"))
                left = min(left, limit - usage + sum(_number(name, folder / "memory.stat") or 0 for name in lists))
    return max(left, 0)


def _number(name: str, file: Path) -> int | None:
    """Return the number after ``name`` at the start of a line; None if there is none (the limit may be "max")."""
    match = re.search(rf"^{name}\s*(\d+)", _text(file), re.MULTILINE)
    return None if match is None else int(match[1])


def _text(file: Path) -> str:
    """Return the text of a file; "" if it cannot be read. These files differ between systems."""
    try:
        return file.read_text()
    except OSError:
        return ""
