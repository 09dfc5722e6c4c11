"""New weights that a training program broadcasts in a process group."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from tests.processes.weight_streams import PROMPT, engine_of, kill_scheduler, started, until_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from aioengine import AsyncEngine
    from tests.kit.weight_versions import Reference

pytestmark = pytest.mark.process

GROUP = "trainer"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def open_group(port: int, world_size: int) -> Any:
    """Open a group in addition to the default group of a program, like training programs."""
    c10d: Any = distributed_c10d
    store, rank, size = next(iter(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size)))
    store = c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), store, group_name=GROUP, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def broadcast(tensors: dict[str, Tensor], group: Any) -> None:
    for tensor in tensors.values():
        dist.broadcast(tensor, 0, group=group)


async def push(engine: AsyncEngine, tensors: dict[str, Tensor], group: Any, **options: Any) -> Any:
    names, shapes = [*tensors], [tensor.shape for tensor in tensors.values()]
    dtypes = [tensor.dtype for tensor in tensors.values()]
    sending = asyncio.to_thread(broadcast, tensors, group)
    updating = engine.update_weights_from_distributed(names, dtypes, shapes, GROUP, **options)
    return (await asyncio.gather(sending, updating))[1]


async def join(engine: AsyncEngine, num_ranks: int) -> Any:
    """Open a group that the engine joins."""
    port, size = free_port(), 1 + num_ranks
    opening = asyncio.to_thread(open_group, port, size)
    joining = engine.init_weights_update_group("127.0.0.1", port, 1, size, GROUP, backend="gloo")
    group, outcome = await asyncio.gather(opening, joining)
    assert outcome, outcome.message
    return group


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"tp_size": 2}])
async def test_broadcast_tensors_replace_the_weights(
    options: dict[str, Any], versions: dict[str, Path], reference: Reference
) -> None:
    new, newer = (load_file(versions[name] / "model.safetensors") for name in ("v2", "v3"))
    async with engine_of(versions, **options) as engine:
        result = await engine.update_weights_from_distributed(["a"], ["float32"], [[3]], GROUP)
        assert "the engine is in no group 'trainer'" in result.message
        group = await join(engine, options.get("tp_size", 1))
        task = started(engine, PROMPT, 150)
        await until_tokens(engine, 10)
        wrong = await push(engine, {"model.norm.weight": torch.ones(65)}, group)
        assert "model.norm.weight has shape [65]" in wrong.message
        assert (await push(engine, new, group, weight_version="v2")) == (True, "", 1)
        await until_tokens(engine, 40)
        assert await engine.begin_weight_update()
        for name, tensor in newer.items():
            assert await push(engine, {name: tensor}, group, flush_cache=False)
        assert await engine.end_weight_update(weight_version="v3")
        assert reference.check(PROMPT, await task) == ["default", "v2", "v3"]
        assert await engine.destroy_weights_update_group(GROUP)
        assert not await engine.destroy_weights_update_group(GROUP)
        with pytest.raises(ValueError, match=r"different lengths: \[1, 2, 1\]"):
            await engine.update_weights_from_distributed(["a"], ["float32", "int8"], [[3]], GROUP)
    dist.destroy_process_group(group)


@pytest.mark.slow
async def test_cancelled_call_logs_no_error_when_it_fails_later(
    versions: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(versions) as engine:
        joining = engine.init_weights_update_group("127.0.0.1", free_port(), 1, 2, GROUP, backend="gloo")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(joining, 0.5)
    del engine, joining
    gc.collect()  # the error of the task
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dp_size": 2, "load_balance_method": "round_robin"}, {"tp_size": 2}])
async def test_kept_broadcasts_are_loaded_again_after_a_loss(
    options: dict[str, Any], versions: dict[str, Path], reference: Reference
) -> None:
    new, newer = (load_file(versions[name] / "model.safetensors") for name in ("v2", "v3"))
    async with engine_of(versions, enable_weights_cpu_backup=True, **options) as engine:
        group = await join(engine, 2 if options else 1)
        assert await push(engine, new, group, weight_version="v2")
        assert await engine.begin_weight_update()
        for bucket in (dict([*newer.items()][:6]), dict([*newer.items()][6:])):
            assert await push(engine, bucket, group)
        assert await engine.end_weight_update(weight_version="v3")
        task = started(engine, PROMPT, 240)
        await until_tokens(engine, 10)
        kill_scheduler(engine)
        assert reference.check(PROMPT, await task) == ["v3"]
    dist.destroy_process_group(group)
