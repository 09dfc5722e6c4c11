"""New weights together with sessions, adapters and HTTP."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aioengine import AsyncEngine
from aioengine.model_files.adapter_folder import TENSORS
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.adapter_files import write_adapter
from tests.kit.waiting import wait_until
from tests.kit.weight_versions import GREEDY, Reference
from tests.openai_api.serving import served
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
    from torch import Tensor

pytestmark = pytest.mark.process

WEIGHTS = "model.safetensors"


def saved(folder: Path, original: Path, tensors: dict[str, Tensor]) -> Path:
    """Copy a model folder, with other weights."""
    shutil.copytree(original, folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(versions: dict[str, Path]) -> AsyncIterator[AsyncEngine]:
    async with engine_of(versions, enable_lora=True, max_lora_rank=4, lora_target_modules="all") as engine:
        yield engine


@pytest.mark.slow
@live
async def test_session_continues_with_new_weights(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference
) -> None:
    session = await engine.open_session()
    history: list[int] = []
    parent: str | None = None
    for version in ("default", "v2", "v3"):
        if version != "default":
            assert await engine.update_weights_from_disk(versions[version], weight_version=version)
        answer = await engine.async_generate(
            input_ids=PROMPT,
            sampling_params={**GREEDY, "max_new_tokens": 20},
            session_params={"id": session, "rid": parent},
        )
        history += PROMPT
        assert reference.check(history, answer) == [version]
        history += answer["output_ids"]
        parent = answer["meta_info"]["id"]
    task = started(engine, PROMPT, 150, session_params={"id": session, "rid": parent})
    await until_tokens(engine, total(engine, "output_tokens") + 10)
    assert await engine.update_weights_from_disk(versions["default"], weight_version="default")
    kill_scheduler(engine)
    assert reference.check(history + PROMPT, await task) == ["v3", "default"]


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Save a model with an adapter of ``write_adapter`` in its weights."""
    tensors, parts = load_file(model / WEIGHTS), load_file(adapter / TENSORS)
    for name, a in parts.items():
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix("lora_A.weight")
            tensors[f"{layer}weight"] += 2 * parts[name.replace("lora_A", "lora_B")] @ a
    return saved(folder, model, tensors)


@live
@pytest.mark.parametrize("by_tensor", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_adapters_change_the_new_weights(
    engine: AsyncEngine, versions: dict[str, Path], reference: Reference, tmp_path: Path, by_tensor: bool
) -> None:
    adapter = write_adapter(tmp_path / "adapter", versions["default"], rank=4, seed=3)
    folders = {name: merged(versions[name], adapter, tmp_path / name) for name in ("default", "v2")}
    adapted = Reference(folders)
    if by_tensor:
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert await engine.load_lora_adapter_from_tensors("own", load_file(adapter / TENSORS), config)
    else:
        assert await engine.load_lora_adapter("own", adapter)
    tasks = [started(engine, prompt, 150, lora_path="own") for prompt in PROMPTS]
    plain = [started(engine, prompt, 150) for prompt in PROMPTS]
    await until_tokens(engine, 60)
    assert await engine.update_weights_from_disk(versions["v2"], weight_version="v2")
    for prompt, task, other in zip(PROMPTS, tasks, plain, strict=True):
        assert adapted.check(prompt, await task) == ["default", "v2"]
        assert reference.check(prompt, await other) == ["default", "v2"]
    kill_scheduler(engine)
    assert adapted.check(PROMPT, await started(engine, PROMPT, 20, lora_path="own")) == ["v2"]
    assert await engine.unload_lora_adapter("own")


@pytest.mark.slow
def test_http_streams_continue_with_new_weights(tmp_path: Path) -> None:
    tensors = load_file(DEMO_MODEL / WEIGHTS)
    layer = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
    new = saved(tmp_path / "new", DEMO_MODEL, tensors | {layer: tensors[layer].flip(0)})
    arguments: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
    body: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    tokenizer, model = Tokenizer(DEMO_MODEL), AutoModelForCausalLM.from_pretrained(new)
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist())
    with served(AsyncEngine(str(DEMO_MODEL), **arguments), served_model_name="demo") as server:
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
        assert text != expected
        chunks: list[dict[str, Any]] = []

        def read() -> None:
            long = body | {"stream": True, "max_tokens": 200, "ignore_eos": True}
            with server.client.stream("POST", "/v1/completions", json=long) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data: {"))
                chunks.extend(json.loads(line.removeprefix("data: ")) for line in lines)

        reader = threading.Thread(target=read)
        reader.start()
        assert wait_until(lambda: len(chunks) > 5)
        assert server.call(server.engine.pause_generation("in_place"))
        result = server.call(server.engine.update_weights_from_tensor({layer: tensors[layer].flip(0)}))
        assert result.num_paused_requests == 1
        assert server.call(server.engine.continue_generation())
        reader.join()
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert "".join(choice["text"] for choice in choices).startswith(text[:5])
        assert choices[-1]["finish_reason"] == "length"
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == expected
        assert server.call(server.engine.get_model_info())["weight_version"] == "1"
