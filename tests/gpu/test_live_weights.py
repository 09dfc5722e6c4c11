"""New weights of a running engine on a GPU with CUDA graphs: answers equal those of a new engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine import AsyncEngine
from aioengine.model_files.online_quantization import Method
from aioengine.runner import weights
from aioengine.runner.device_memory import NoAttention
from aioengine.runner.inputs import model_inputs
from tests.compute.quantized import METHODS, quantize_checkpoint
from tests.compute.runner_world import save_model
from tests.gpu import test_online_quantization, test_quantized
from tests.gpu.test_quantized import SIZES
from tests.gpu.test_recovery import CONTEXT_LENGTH, DEVICE, HEADS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from aioengine.models._base import Model

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
        ends = [spans_of_row for spans_of_row in spans if spans_of_row]
        assert all([version for version, _, _ in spans_of_row] == ["default", "1"] for spans_of_row in ends)
        for prompt, own, [_, (_, start, stop)] in zip(prompts, ids, ends, strict=True):
            rest = await other.async_generate(
                input_ids=prompt + own[:start], sampling_params=greedy(NUM_TOKENS - start)
            )
            assert rest["output_ids"] == own[start:stop]
        expected = await other.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        actual = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert actual["output_ids"] == expected["output_ids"]


async def test_tensors_on_the_gpu_and_released_memory(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", 0.1), save(tmp_path / "new", 0.2)
    prompts = [[7, 8, 9], list(range(100))]
    tensors = [(name, tensor.to(DEVICE)) for name, tensor in load_file(new / "model.safetensors").items()]
    async with engine_of(new) as other:
        expected = await other.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
    async with engine_of(old, enable_memory_saver=True) as engine:

        async def check() -> None:
            actual = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
            assert actual["output_ids"] == expected["output_ids"]

        before = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert before["output_ids"] != expected["output_ids"]
        assert await engine.begin_weight_update()
        assert await engine.update_weights_from_tensor(tensors[::2])
        assert not await engine.end_weight_update(), "half of the tensors are missing"
        assert await engine.update_weights_from_tensor(tensors[1::2])
        assert await engine.end_weight_update()
        await check()
        name, tensor = tensors[0]
        assert await engine.get_weights_by_name(name, 2) == tensor[:2].float().tolist()
        with pytest.raises(RuntimeError, match="weights that were given as tensors would be lost"):
            await engine.release_memory_occupation("weights")
        await engine.release_memory_occupation("kv_cache")
        await engine.resume_memory_occupation("kv_cache")
        await check()
        assert await engine.update_weights_from_disk(str(new))
        await engine.release_memory_occupation()
        for tag in ("cuda_graph", "weights", "kv_cache"):
            await engine.resume_memory_occupation(tag)
        await check()
        for tag in ("weights", "cuda_graph"):
            await engine.release_memory_occupation(tag)
            await engine.resume_memory_occupation(tag)
            await check()
        assert await engine.update_weights_from_disk(str(old))
        actual = await engine.async_generate(input_ids=prompts, sampling_params=greedy(NUM_TOKENS))
        assert actual["output_ids"] == before["output_ids"]


def graph_of(model: Model, num_tokens: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step without attention, and return its logits, too."""

    def step() -> Tensor:
        ids = torch.arange(1, num_tokens + 1, device=DEVICE)  # all numbers of token 0, the padding, are zeros
        inputs = model_inputs(model, ids, ids)
        return model.compute_logits(model.forward(inputs, NoAttention(model.attention_shape)))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    graph.replay()
    return graph, logits


def check_reloading(model: Model, new: Model, folder: Path) -> None:
    """Load the weights of ``new``, in a folder, into a model. Graphs that were captured before must read them."""
    graphs = [graph_of(model, num_tokens) for num_tokens in (1, 20, 80)]
    expected = [graph_of(new, num_tokens)[1] for num_tokens in (1, 20, 80)]
    assert not any(torch.equal(logits, wanted) for (_, logits), wanted in zip(graphs, expected, strict=True))
    model.open_for_loading()
    weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    for (graph, logits), wanted in zip(graphs, expected, strict=True):
        graph.replay()
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_graphs_read_new_weights_that_are_quantized_again(method: Method, tied: bool, tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    for shift, folder in enumerate(folders):
        save_model("qwen2", folder, tie_word_embeddings=tied, dtype=torch.bfloat16, **SIZES)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor.roll(shift, -1) for name, tensor in tensors.items()}, folder / "model.safetensors")
    old, new = (test_online_quantization.loaded(folder, method, batch_invariant=False) for folder in folders)
    check_reloading(old, new, folders[1])


@pytest.mark.parametrize("name", METHODS)
def test_graphs_read_the_weights_of_a_new_quantized_checkpoint(name: str, tmp_path: Path) -> None:
    models: list[Model] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_model("qwen2", tmp_path, tie_word_embeddings=False, **SIZES)
        tensors = {name: tensor.roll(seed, -1) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
        quantized, _ = quantize_checkpoint(tensors, METHODS[name])
        models.append(test_quantized.loaded(tmp_path, quantized, METHODS[name].config, batch_invariant=False))
    check_reloading(*models, tmp_path)
