"""How many pages fit, with the files of a machine made up."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.attention._base import AttentionShape
from aioengine.runner.device_memory import Demand, PoolBudget, fit_pages, format_bytes, free_memory, kv_bytes_per_token
from aioengine.settings.page_groups import PageGroups
from aioengine.settings.planning import plan
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.tiny_sizes import CONTEXT_LENGTH

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
GIB = 1 << 30
DEMAND = Demand(
    num_tokens=None,
    groups=PageGroups(windows=(None,), page_size=16),
    page_bytes=16 * 1024,
    context_length=2048,
    max_tokens=1 << 40,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"}


def test_the_machine_without_groups(tmp_path: Path) -> None:
    assert free_memory(CPU, root=write(tmp_path, MEMINFO)) == 8 * GIB


def test_a_group_of_version_2_and_its_ancestors(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/user/box\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/user/box/memory.max": "max\n",
        "sys/fs/cgroup/user/box/memory.current": f"{GIB}\n",
    }
    assert free_memory(CPU, root=write(tmp_path, files)) == GIB + GIB // 2


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/../../docker/abc\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    assert free_memory(CPU, root=write(tmp_path, files)) == GIB


def test_a_group_of_version_1(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n1:name=systemd:/y\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/x/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 4}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    assert free_memory(CPU, root=write(tmp_path, files)) == GIB + GIB // 4


def test_a_group_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert free_memory(CPU, root=write(tmp_path, files)) == 0


def test_a_machine_without_proc_is_taken_to_be_half_free(tmp_path: Path) -> None:
    assert free_memory(CPU, root=tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_this_machine_says_something() -> None:
    assert free_memory(CPU) > 0


def test_bytes_of_a_token() -> None:
    shape = AttentionShape(num_layers=3, num_heads=8, num_kv_heads=2, head_size=64, scale=1.0)
    assert kv_bytes_per_token(shape, torch.bfloat16) == 2 * 3 * 2 * 64 * 2
    assert kv_bytes_per_token(shape, torch.float32) == 2 * 3 * 2 * 64 * 4


def room(num_bytes: int) -> PoolBudget:
    """As on a CPU with so much free memory, of which half may be used."""
    return PoolBudget(num_bytes, num_bytes // 2, "these are the words")


def test_the_share_that_may_be_used() -> None:
    assert fit_pages(DEMAND, room(GIB)) == GIB // 2 // (16 * 1024)


def test_no_more_than_can_be_used() -> None:
    assert fit_pages(replace(DEMAND, max_tokens=4001), room(GIB)) == 251


def test_not_even_one_context() -> None:
    with pytest.raises(
        ValueError,
        match=r"capacity of 2032 tokens.*2048 \(context_length\), which need 2 MiB; these are the words\.",
    ):
        fit_pages(DEMAND, room(2 * (2 << 20) - 1))
    assert fit_pages(DEMAND, room(2 * (2 << 20))) == 128


def test_a_given_number_of_pages() -> None:
    given = replace(DEMAND, num_tokens=48)
    assert fit_pages(given, room(GIB)) == 3
    with pytest.raises(
        ValueError, match=r"48 tokens needs 0 MiB, but only 0 MiB are available; these.*Lower max_total_tokens"
    ):
        fit_pages(given, room(1000))
    with pytest.raises(ValueError, match="at least one page of 16 tokens, got 0"):
        fit_pages(replace(DEMAND, num_tokens=0), room(GIB))


def test_bytes_in_words() -> None:
    assert (format_bytes(3 << 20), format_bytes(GIB + GIB // 2)) == ("3 MiB", "1.5 GiB")


WINDOWS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
}


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_has_the_sizes_of_the_engine(tmp_path: Path, family: str, dtype: str) -> None:
    save_model(family, tmp_path, dtype=torch.float32, **WINDOWS[family])
    facts = World(make_settings(tmp_path, dtype=dtype, page_size=16, num_pages=64)).runner.facts
    planned = plan(tmp_path, device="cpu", dtype=dtype, page_size=16, max_total_tokens=1024)
    assert planned.weights_bytes == facts["weights_bytes"]
    assert (planned.kv_pool_bytes, planned.max_total_tokens) == (facts["kv_pool_bytes"], facts["max_total_tokens"])
    assert planned.max_requests == 1024 // CONTEXT_LENGTH
