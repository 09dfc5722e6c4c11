"""New weights for a running engine on a GPU, with CUDA graphs: a new engine gives the same answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from aioengine import AsyncEngine
from tests.compute.runner_world import save_model
from tests.gpu.test_recovery import CONTEXT_LENGTH, DEVICE, HEADS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

NUM_TOKENS = 200


def save(folder: Path, initializer_range: float) -> Path:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": initializer_range}
    save_model("qwen3", folder, dtype=torch.bfloat16, **sizes)
    return folder


def engine_of(folder: Path, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        str(folder),
        device=DEVICE,
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        max_total_tokens=32 * CONTEXT_LENGTH,
        **options,
    )


def greedy(num_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}


async def test_answers_are_those_of_an_engine_with_the_new_weights(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 0.1), save(tmp_path / "new", 0.2)
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(rng.randrange(1, 300))] for _ in range(16)]
    async with engine_of(old) as engine, engine_of(new) as other:
        streams = [
            engine.async_generate(input_ids=prompt, sampling_params=greedy(NUM_TOKENS), stream=True)
            for prompt in prompts
        ]
        ids = [(await anext(stream))["output_ids"] for stream in streams]
        assert await engine.update_weights_from_disk(str(new))
        spans: list[Any] = []
        for stream, own in zip(streams, ids, strict=True):
            async for chunk in stream:
                own += chunk["output_ids"]
                spans.append(chunk["meta_info"].get("weight_versions"))
        ends = [found for found in spans if found]
        assert all([version for version, _, _ in found] == ["default", "1"] for found in ends)
        for prompt, own, [_, (_, start, stop)] in zip(prompts, ids, ends, strict=True):
            rest = await other.async_generate(
                input_ids=prompt + own[:start], sampling_params=greedy(NUM_TOKENS - start)
            )
            assert rest["output_ids"] == own[start:stop]
        expected = await other.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        found = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert found["output_ids"] == expected["output_ids"]


async def test_tensors_on_the_gpu_and_released_memory(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 0.1), save(tmp_path / "new", 0.2)
    prompts = [[7, 8, 9], list(range(100))]
    tensors = [(name, tensor.to(DEVICE)) for name, tensor in load_file(new / "model.safetensors").items()]
    async with engine_of(old, enable_memory_saver=True) as engine, engine_of(new) as other:
        expected = await other.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        before = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert before["output_ids"] != expected["output_ids"]
        assert await engine.begin_weight_update()
        assert await engine.update_weights_from_tensor(tensors[::2])
        assert not await engine.end_weight_update(), "half of the tensors are missing"
        assert await engine.update_weights_from_tensor(tensors[1::2])
        assert await engine.end_weight_update()
        found = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert found["output_ids"] == expected["output_ids"]
        memory: Any = (await engine.get_server_info())["memory"]
        free = torch.cuda.mem_get_info()[0]
        await engine.release_memory_occupation("kv_cache")
        assert torch.cuda.mem_get_info()[0] - free > 0.9 * memory["kv_pool_bytes"]
        await engine.resume_memory_occupation("kv_cache")
        found = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert found["output_ids"] == expected["output_ids"]
        name, tensor = tensors[0]
        assert await engine.get_weights_by_name(name, 2) == tensor[:2].float().tolist()
