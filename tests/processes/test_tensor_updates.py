"""New weights that a program sends as tensors, in one call or in several."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from aioengine import AsyncEngine, RequestError
from aioengine.frontend.controls import Controls
from aioengine.protocol.weight_messages import WeightCall
from tests.kit.waiting import until
from tests.kit.weight_versions import Reference
from tests.processes.weight_streams import (
    PROMPT,
    PROMPTS,
    begin,
    engine_of,
    kill_scheduler,
    live,
    started,
    total,
    until_tokens,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def tensors(versions: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    """Version -> name -> tensor."""
    return {version: load_file(folder / "model.safetensors") for version, folder in versions.items()}


def buckets(tensors: dict[str, Tensor], size: int = 6) -> list[list[tuple[str, Tensor]]]:
    pairs = list(tensors.items())
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


async def check_running_requests(
    engine: AsyncEngine, tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    tasks = [started(engine, prompt, 200) for prompt in PROMPTS]
    await until_tokens(engine, 30)
    transposed = {name: tensor.t().contiguous().t() for name, tensor in tensors["v2"].items() if tensor.dim() == 2}
    result = await engine.update_weights_from_tensor({**tensors["v2"], **transposed}, weight_version="v2")
    assert result == (True, "", 3)
    await until_tokens(engine, 120)
    assert await engine.begin_weight_update()
    for bucket in buckets(tensors["v3"]):
        assert await engine.update_weights_from_tensor(bucket)
    assert await engine.end_weight_update(weight_version="v3") == (True, "")
    for prompt, task in zip(PROMPTS, tasks, strict=True):
        assert reference.check(prompt, await task) == ["default", "v2", "v3"]


@live
async def test_tensors_replace_the_weights_of_running_requests(
    engine: AsyncEngine, tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    await check_running_requests(engine, tensors, reference)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"dp_size": 2, "load_balance_method": "round_robin"}])
async def test_tensors_replace_the_weights_of_all_ranks_and_replicas(
    versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference, options: dict[str, Any]
) -> None:
    async with engine_of(versions, **options) as engine:
        await check_running_requests(engine, tensors, reference)


@live
async def test_parts_of_the_weights_are_replaced(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]]
) -> None:
    """Also parts of fused layers."""
    changed = dict(tensors["default"])
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        changed[name] = tensors["v2"][name]
        assert await engine.update_weights_from_tensor([(name, changed[name].double())])
    for name, tensor in changed.items():
        assert await engine.get_weights_by_name(name, truncate_size=7) == tensor[:7].tolist()
    assert await engine.get_weights_by_name("model.unknown") is None
    assert int((await engine.get_model_info())["weight_version"]) > 2  # the number of updates


@live
async def test_wrong_tensors_change_nothing(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    name = "model.norm.weight"
    wrong = {
        "1 tensor not expected by this model: other.weight": {"other.weight": torch.ones(64)},
        "model.norm.weight has shape [65], and the model expects [64]": {name: torch.ones(65)},
        "model.norm.weight is of type I32": {name: torch.ones(64, dtype=torch.int32)},
        "tensor model.norm.weight has numbers that are not finite in float32": {name: torch.full((64,), torch.nan)},
    }
    task = started(engine, PROMPT, 200)
    await until_tokens(engine, 10)
    for message, changes in wrong.items():
        result = await engine.update_weights_from_tensor({**tensors["v2"], **changes})
        assert not result
        assert message in result.message
        assert "/proc" not in result.message
    sparse, meta = torch.eye(4).to_sparse(), torch.ones(4, device="meta")
    with pytest.raises(ValueError, match=r"a has the layout torch.sparse_coo; give a dense tensor"):
        await engine.update_weights_from_tensor({"a": sparse})
    with pytest.raises(ValueError, match="a is on the device 'meta', so it has no numbers"):
        await engine.update_weights_from_tensor({"a": meta})
    with pytest.raises(TypeError, match="flush_cache must be True or False"):
        await engine.update_weights_from_tensor({"a": meta}, None, "yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"named_tensors\['a'\] must be a torch.Tensor"):
        await engine.update_weights_from_tensor({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="named_tensors must be pairs"):
        await engine.update_weights_from_tensor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="named_tensors is empty"):
        await engine.update_weights_from_tensor([])
    assert reference.check(PROMPT, await task) == ["default"]


@live
async def test_incomplete_update_stays_open_and_computes_nothing(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    assert await engine.end_weight_update() == (False, "no weight update is open; call begin_weight_update first")
    assert await engine.begin_weight_update()
    message = "a weight update is open already; call end_weight_update first"
    assert await engine.begin_weight_update() == (False, message)
    task = started(engine, PROMPT, 30)
    first, *others = buckets(tensors["v2"])
    for bucket in others:
        assert await engine.update_weights_from_tensor(bucket, weight_version="v2")
    assert not await engine.update_weights_from_tensor([("wrong", torch.ones(3)), *first])
    result = await engine.end_weight_update()
    assert not result
    assert "the update is incomplete and stays open: 6 tensors missing: lm_head.weight" in result.message
    assert await engine.update_weights_from_tensor(first)
    assert await engine.end_weight_update()
    assert reference.check(PROMPT, await task) == ["v2"]


@live
async def test_checkpoint_ends_an_open_update(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    assert await engine.begin_weight_update()
    assert await engine.update_weights_from_tensor(buckets(tensors["v2"])[0])
    assert await engine.update_weights_from_disk(versions["v3"], weight_version="v3")
    assert not await engine.end_weight_update()
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["v3"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeping(versions: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    """An engine that keeps copies of new weights."""
    async with engine_of(versions, enable_weights_cpu_backup=True) as engine:
        yield engine


@pytest.mark.slow
@live
async def test_kept_tensors_are_loaded_again_after_a_loss(
    keeping: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    engine = keeping
    await begin(engine, versions)
    task = started(engine, PROMPT, 240)
    await until_tokens(engine, 10)
    assert await engine.update_weights_from_tensor(tensors["v2"], weight_version="v2")
    assert await engine.begin_weight_update()
    for bucket in buckets(tensors["v3"]):
        assert await engine.update_weights_from_tensor(bucket)
    assert await engine.end_weight_update(weight_version="v3")
    name = "model.norm.weight"
    assert await engine.update_weights_from_tensor([(name, tensors["v3"][name])], weight_version="v3")
    await until_tokens(engine, 30)
    kill_scheduler(engine)
    assert reference.check(PROMPT, await task)[-1] == "v3"
    assert total(engine, "num_restarts") == 1
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["v3"]


@pytest.mark.slow
@live
async def test_requests_end_if_their_tensors_are_lost(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    assert await engine.update_weights_from_disk(versions["v3"], weight_version="v3")
    assert await engine.update_weights_from_tensor(tensors["v2"], weight_version="v2")
    task = started(engine, PROMPT, 240)
    await until_tokens(engine, 10)
    kill_scheduler(engine)
    with pytest.raises(
        RequestError, match=r"weights of version 'v2', which were given as tensors, are lost .*_cpu_backup=True"
    ):
        await task
    assert (await engine.get_model_info())["weight_version"] == "v3"
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["v3"]
    result = await engine.update_weights_from_tensor({"lm_head.weight": tensors["v2"]["lm_head.weight"]})
    assert "the weights that were given as tensors were lost with their process" in result.message
    assert await engine.begin_weight_update()
    assert await engine.update_weights_from_tensor(tensors["v2"])
    assert await engine.end_weight_update(weight_version="v2")
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["v2"]


@pytest.mark.slow
@live
async def test_update_is_not_open_after_the_loss_of_its_process(
    engine: AsyncEngine, versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    assert await engine.begin_weight_update()
    first, *others = buckets(tensors["v2"])
    assert await engine.update_weights_from_tensor(first)
    kill_scheduler(engine)
    await until(lambda: total(engine, "num_restarts") == 1)
    result = await engine.update_weights_from_tensor(others[0])
    assert "no weight update is open, because the process was replaced" in result.message
    assert (await engine.update_weights_from_tensor(first)) == result  # no update of its own
    assert (await engine.end_weight_update()) == (False, result.message)
    assert (await engine.get_model_info())["weight_version"] == "default"
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["default"]
    assert await engine.begin_weight_update()
    kill_scheduler(engine)
    await until(lambda: total(engine, "num_restarts") == 2)
    assert await engine.begin_weight_update()


@live
async def test_update_is_finished_if_its_caller_is_cancelled(
    engine: AsyncEngine,
    keeping: AsyncEngine,
    versions: dict[str, Path],
    tensors: dict[str, dict[str, Tensor]],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_sent = asyncio.Event()
    ask = Controls.ask

    def noted(controls: Controls, name: str, *arguments: Any, **options: Any) -> Any:
        if name == WeightCall.LOAD:
            is_sent.set()
        return ask(controls, name, *arguments, **options)

    monkeypatch.setattr(Controls, "ask", noted)
    for either in (engine, keeping):
        await begin(either, versions)
        is_sent.clear()
        update = asyncio.create_task(either.update_weights_from_tensor(tensors["v2"], weight_version="v2"))
        await is_sent.wait()
        update.cancel()
        assert await either.update_weights_from_tensor(tensors["v3"], weight_version="v3")
        assert update.cancelled()
        assert reference.check(PROMPT, await started(either, PROMPT, 20)) == ["v3"]
        assert total(either, "num_restarts") == 0


@pytest.mark.slow
async def test_all_replicas_continue_after_the_loss_of_an_update(
    versions: dict[str, Path], tensors: dict[str, dict[str, Tensor]], reference: Reference
) -> None:
    async with engine_of(versions, dp_size=2, load_balance_method="round_robin") as engine:
        assert await engine.begin_weight_update()
        first, *others = buckets(tensors["v2"])
        assert await engine.update_weights_from_tensor(first)
        pid = next(process["pid"] for process in engine.health()["processes"] if process["role"] == "scheduler")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.stats()["num_restarts"] == 1)
        result = await engine.update_weights_from_tensor(others[0])
        assert "no weight update is open, because the process was replaced" in result.message
        for task, prompt in [(started(engine, prompt, 20), prompt) for prompt in PROMPTS]:
            assert reference.check(prompt, await task) == ["default"]
        assert await engine.begin_weight_update()
        assert await engine.update_weights_from_tensor(tensors["v2"])
        assert await engine.end_weight_update(weight_version="v2")
        for task, prompt in [(started(engine, prompt, 20), prompt) for prompt in PROMPTS]:
            assert reference.check(prompt, await task) == ["v2"]
