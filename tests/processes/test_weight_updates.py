"""New weights for a running engine: every token is computed by the version that its answer names."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine import Engine
from aioengine.frontend.controls import Controls
from aioengine.protocol.weight_messages import WeightCall
from tests.kit.waiting import until
from tests.kit.weight_versions import ARGUMENTS, GREEDY, Reference
from tests.processes.weight_streams import (
    PROMPT,
    PROMPTS,
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

    from aioengine import AsyncEngine

pytestmark = pytest.mark.process


@live
async def test_running_requests_continue_with_the_new_weights(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference
) -> None:
    tasks = [started(engine, prompt, 150) for prompt in PROMPTS]
    await until_tokens(engine, 30)
    result = await engine.update_weights_from_disk(versions["v2"], weight_version="v2")
    assert result == (True, "", 3)
    for prompt, task in zip(PROMPTS, tasks, strict=True):
        answer = await task
        assert reference.check(prompt, answer) == ["default", "v2"]
        assert answer["meta_info"]["num_retractions"] == 1
    again = await engine.async_generate(input_ids=PROMPTS[2], sampling_params={**GREEDY, "max_new_tokens": 9})
    assert again["meta_info"]["cached_tokens"] > 0  # of the new weights
    assert reference.check(PROMPTS[2], again) == ["v2"]
    info = await engine.get_model_info()
    assert (info["weight_version"], info["model_path"]) == ("v2", str(versions["v2"]))


@live
async def test_requests_paused_in_place_keep_their_kv(engine: AsyncEngine, versions: dict[str, Path]) -> None:
    task = started(engine, PROMPT, 100)
    await until_tokens(engine, 20)
    assert await engine.pause_generation("in_place")
    assert engine.is_paused
    assert (await engine.update_weights_from_disk(versions["v2"])).num_paused_requests == 1
    assert await engine.continue_generation()
    assert not engine.is_paused
    info = (await task)["meta_info"]
    version = (await engine.get_model_info())["weight_version"]  # a number
    assert [version for version, _, _ in info["weight_versions"]] == ["default", str(int(version))]
    assert info["num_retractions"] == 0


@live
async def test_retracted_requests_continue_after_a_pause(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference
) -> None:
    task = started(engine, PROMPT, 100)
    await until_tokens(engine, 20)
    assert await engine.pause_generation("retract")
    await until(lambda: engine.stats()["num_running"] == 0)
    assert engine.stats()["num_free_pages"] == engine.stats()["num_pages"]
    assert await engine.flush_cache() == (
        False,
        "the cache is not flushed while requests use it: 0 running, 1 waiting",
    )
    assert await engine.update_weights_from_disk(versions["v2"], weight_version="v2") == (True, "", 0)
    assert await engine.continue_generation()
    assert reference.check(PROMPT, await task) == ["default", "v2"]


@live
async def test_prefixes_of_old_weights_are_not_reused(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference
) -> None:
    for version, path in (("default", None), ("v2", versions["v2"]), ("default", versions["default"])):
        if path is not None:
            assert await engine.update_weights_from_disk(path, weight_version=version)
        for num_cached in (0, 32):
            answer = await engine.async_generate(
                input_ids=PROMPTS[2], sampling_params={**GREEDY, "max_new_tokens": 5}, return_logprob=True
            )
            assert answer["meta_info"]["cached_tokens"] == num_cached
            assert reference.check(PROMPTS[2], answer) == [version]


def nan_in(tensor: Tensor) -> Tensor:
    return tensor.index_fill(0, torch.tensor([3]), float("nan"))


DAMAGES = {
    r"1 tensor missing: model\.norm\.weight": lambda tensors: tensors.pop("model.norm.weight"),
    r"1 tensor not expected by this model: model\.extra": lambda tensors: tensors.update(
        {"model.extra": torch.ones(3)}
    ),
    r"model\.norm\.weight has shape \[65\], and the model expects \[64\]": lambda tensors: tensors.update(
        {"model.norm.weight": torch.ones(65)}
    ),
    r"model\.norm\.weight is of type I64": lambda tensors: tensors.update(
        {"model.norm.weight": torch.ones(64, dtype=torch.int64)}
    ),
    r"lm_head\.weight has numbers that are not finite": lambda tensors: tensors.update(
        {"lm_head.weight": nan_in(tensors["lm_head.weight"])}
    ),
}


@live
async def test_refused_weights_change_nothing(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    task = started(engine, PROMPT, 200)
    await until_tokens(engine, 10)
    for number, (message, damage) in enumerate(DAMAGES.items()):
        folder = tmp_path / str(number)
        shutil.copytree(versions["v2"], folder)
        tensors = load_file(folder / "model.safetensors")
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")
        result = await engine.update_weights_from_disk(folder, weight_version="v2")
        assert not result
        with pytest.raises(ValueError, match=message):
            raise ValueError(result.message)
    result = await engine.update_weights_from_disk(tmp_path / "missing")
    assert not result
    assert "missing" in result.message
    config = versions["v2"] / "config.json"
    other = tmp_path / "other"
    shutil.copytree(versions["v2"], other)
    (other / "config.json").write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    result = await engine.update_weights_from_disk(other)
    assert "describes another model than the config.json of this engine: rms_norm_eps" in result.message
    assert reference.check(PROMPT, await task) == ["default"]
    assert (await engine.get_model_info())["weight_version"] == "default"


@live
async def test_files_that_change_after_their_check_change_nothing(
    engine: AsyncEngine,
    versions: dict[str, Path],
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "new"
    shutil.copytree(versions["v2"], folder)
    ask = Controls.ask

    async def ask_and_change(controls: Controls, name: str, *arguments: Any, **options: Any) -> Any:
        reply = await ask(controls, name, *arguments, **options)
        if name == WeightCall.CHECK:
            shutil.copy(versions["v3"] / "model.safetensors", folder)
        return reply

    monkeypatch.setattr(Controls, "ask", ask_and_change)
    result = await engine.update_weights_from_disk(folder, weight_version="v2")
    assert not result
    assert "model.safetensors was changed after it was checked" in result.message
    assert reference.check(PROMPT, await started(engine, PROMPT, 20)) == ["default"]


@live
async def test_lost_scheduler_starts_with_the_newest_weights(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference
) -> None:
    task = started(engine, PROMPT, 200)
    await until_tokens(engine, 10)
    assert await engine.update_weights_from_disk(versions["v2"], weight_version="v2")
    await until_tokens(engine, 30)
    kill_scheduler(engine)
    assert reference.check(PROMPT, await task) == ["default", "v2"]
    assert total(engine, "num_restarts") == 1
    answer = await engine.async_generate(input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 9})
    assert reference.check(PROMPT, answer) == ["v2"]


@pytest.mark.slow
async def test_versions_of_lost_tokens_are_forgotten(versions: dict[str, Path]) -> None:
    async with engine_of(versions, stream_interval=500) as engine:  # only the first token is delivered at once
        task = started(engine, PROMPT, 200)
        for version in ("v2", "default"):
            await until_tokens(engine, engine.stats()["output_tokens"] + 10)
            assert await engine.pause_generation("retract")
            assert await engine.update_weights_from_disk(versions[version], weight_version=version)
            if version == "v2":
                assert await engine.continue_generation()
        kill_scheduler(engine)
        await until(lambda: engine.stats()["num_restarts"] == 1)
        assert await engine.continue_generation()
        assert (await task)["meta_info"]["weight_versions"] == [("default", 0, 200)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"dp_size": 2, "load_balance_method": "round_robin"}])
async def test_all_ranks_and_replicas_get_the_new_weights(
    versions: dict[str, Path], reference: Reference, options: dict[str, Any], tmp_path: Path
) -> None:
    async with engine_of(versions, **options) as engine:
        tasks = [started(engine, prompt, 150) for prompt in PROMPTS]
        await until_tokens(engine, 30)
        shutil.copytree(versions["v2"], tmp_path / "damaged")
        tensors = load_file(tmp_path / "damaged" / "model.safetensors")
        save_file(tensors | {"extra": torch.ones(3)}, tmp_path / "damaged" / "model.safetensors")
        assert "extra" in (await engine.update_weights_from_disk(tmp_path / "damaged")).message
        assert (await engine.update_weights_from_disk(versions["v2"], weight_version="v2")).num_paused_requests == 3
        for prompt, task in zip(PROMPTS, tasks, strict=True):
            assert reference.check(prompt, await task) == ["default", "v2"]


@pytest.mark.slow
def test_engine_for_synchronous_code_updates_weights(versions: dict[str, Path], reference: Reference) -> None:
    with Engine(model_path=str(versions["default"]), **ARGUMENTS) as engine:
        assert engine.update_weights_from_disk(str(versions["v2"]), weight_version="v2").success
        assert not engine.is_paused
        answer = engine.generate(input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 9})
        assert reference.check(PROMPT, answer) == ["v2"]
        tensors = load_file(versions["v3"] / "model.safetensors")
        assert engine.begin_weight_update()
        assert engine.update_weights_from_tensor(list(tensors.items()), None, True)
        assert engine.end_weight_update(weight_version="v3")
        assert engine.get_weights_by_name("model.norm.weight") == tensors["model.norm.weight"][:100].tolist()
        answer = engine.generate(input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 9})
        assert reference.check(PROMPT, answer) == ["v3"]
        with pytest.raises(ValueError, match="load_format must be"):
            engine.update_weights_from_disk(str(versions["v2"]), "pickle")
        with pytest.raises(TypeError, match="model_path must be"):
            engine.update_weights_from_disk(3)  # type: ignore[arg-type]
