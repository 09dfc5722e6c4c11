"""How many pages fit.

The free memory of a CPU is what the machine has available, and at most what is left of the limits of its control
groups (version 1 and 2, each ancestor); file pages that the kernel can drop count as free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from aioengine.attention._base import AttentionShape

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked for. ``num_pages`` None: as many as fit. ``max_tokens``: more could never be used."""

    num_pages: int | None
    page_size: int
    bytes_per_token: int
    context_length: int
    max_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for the pool. free_bytes: what a given number of pages may take. usable_bytes: what as many as fit may
    take. words: where these come from.
    """

    free_bytes: int
    usable_bytes: int
    words: str


def in_words(num_bytes: int) -> str:
    """ "1.5 GiB" or "300 MiB" """
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def kv_bytes_per_token(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * dtype.itemsize


def fit_pages(demand: Demand, room: Room) -> int:
    """The number of pages of the pool.

    Raises:
        ValueError: the pages that were asked for do not fit, or not even one context fits.
    """
    if demand.num_pages is not None:
        return _check_given(demand, demand.num_pages, room)
    num_pages = min(room.usable_bytes // demand.page_bytes, _pages_for(demand.max_tokens, demand))
    if num_pages * demand.page_size < demand.context_length:
        need = _pages_for(demand.context_length, demand) * demand.page_bytes
        message = (
            f"the KV pool has room for {num_pages * demand.page_size} tokens, but one context has "
            f"{demand.context_length} and needs {in_words(need)}; {room.words}. Lower context_length, raise "
            "mem_fraction_static, or free some memory"
        )
        raise ValueError(message)
    return num_pages


def _check_given(demand: Demand, num_pages: int, room: Room) -> int:
    if num_pages < 1:
        message = f"the KV pool must have at least one page of {demand.page_size} tokens, not {num_pages} pages"
        raise ValueError(message)
    need = num_pages * demand.page_bytes
    if need > room.free_bytes:
        message = (
            f"a KV pool of {num_pages * demand.page_size} tokens needs {in_words(need)}, but there is room for "
            f"{in_words(room.free_bytes)}; {room.words}. Lower max_total_tokens"
        )
        raise ValueError(message)
    return num_pages


def _pages_for(num_tokens: int, demand: Demand) -> int:
    return -(-num_tokens // demand.page_size)


def free_memory(device: torch.device, *, root: Path = Path("/")) -> int:
    """Bytes that can still be taken on the device; ``root`` is where proc and sys are mounted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _available(root / "proc/meminfo")
    if available is None:
        # macOS has no such file: half of what is built in is a guess that leaves room for the rest of the system
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(min([available, *_left_in_groups(root)]), 0)


def _available(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(root: Path) -> list[int]:
    """What is left of the limit of each control group that this process is in, with its ancestors."""
    left: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's and not exist here: the mount itself is our group then.
        group = Path(path.lstrip("/"))
        left += [_left(mount / ancestor, *names) for ancestor in (group, *group.parents)]
    return [size for size in left if size is not None]


def _left(group: Path, limit_name: str, usage_name: str, droppable_name: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None:
        return None
    droppable = 0
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == droppable_name:
            droppable = int(value)
    return limit - usage + droppable


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or no limit ("max")."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
