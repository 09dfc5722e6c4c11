"""Two ranks on two GPUs: sums of hidden states, answers of a complete engine, the loss of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aioengine import AsyncEngine
from tests.compute.runner_world import save_model
from tests.gpu.test_draft_models import answers
from tests.gpu.test_recovery import CONTEXT_LENGTH, DEVICE, HEADS, check_recovery
from tests.kit.adapter_files import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LENGTHS = (1, 5, 40, 300, 700)
"""Of prompts."""
SUMS = """
import sys

import torch

from aioengine.kernels.norms import add_rms_norm
from aioengine.layers.ranks import RankGroup

rank, COLUMNS = int(sys.argv[1]), 1024
group = RankGroup(rank, 2, store_file=sys.argv[2], device=torch.device("cuda"), batch_invariant=False)
group.open_inboxes(3000, COLUMNS, torch.bfloat16)
assert group._inboxes is not None
with torch.inference_mode():
    for number, num_rows in enumerate([1, 32, 33, 200, 3000, 3001, 1] * 30):
        generator = torch.Generator("cuda").manual_seed(number)
        parts = torch.randn(2, num_rows, COLUMNS, device="cuda", generator=generator).bfloat16()
        total = (parts[0].float() + parts[1].float()).bfloat16()
        assert torch.equal(group.all_reduce(parts[rank].clone()), total), num_rows
        residual = torch.randn(num_rows, COLUMNS, device="cuda", generator=generator).bfloat16()
        weight, epsilon = residual[0].clone(), torch.tensor(1e-5, device="cuda")
        expected_stream = residual.clone()
        expected = add_rms_norm(total, expected_stream, weight, epsilon)
        actual = group.add_rms_norm(parts[rank].clone(), residual, weight, epsilon)
        assert torch.equal(residual, expected_stream), num_rows
        torch.testing.assert_close(actual, expected, atol=0, rtol=0.02)
"""


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    """Sums of few and many rows follow each other: no rank overwrites a message that another one has not read."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SUMS, str(rank), str(tmp_path / "ranks")],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors


async def test_greedy_tokens_are_those_of_one_rank_in_fp32(tmp_path: Path) -> None:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    save_model("qwen3", tmp_path, dtype=torch.float32, **sizes)
    prompts = [[(length * 7 + place * place) % 260 for place in range(length)] for length in LENGTHS]
    results: list[list[list[int]]] = []
    for tp_size in (1, 2):
        async with AsyncEngine(
            str(tmp_path), device=DEVICE, dtype="float32", skip_tokenizer_init=True, tp_size=tp_size
        ) as engine:
            params = {"temperature": 0, "max_new_tokens": 60}
            answer = await engine.async_generate(input_ids=prompts, sampling_params=params)
            results.append(answer["output_ids"])
    assert results[0] == results[1]


async def test_answers_with_and_without_graphs_are_equal(tmp_path: Path) -> None:
    """Penalties and other parameters, which only rank 0 knows, do not change the steps of the other rank."""
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **sizes)
    in_graphs, _ = await answers(tmp_path, tp_size=2)
    without, _ = await answers(tmp_path, tp_size=2, disable_cuda_graph=True)
    assert in_graphs == without


async def test_deterministic_streams_continue_after_the_loss_of_a_rank(tmp_path: Path) -> None:
    await check_recovery(tmp_path, ["runner-1", "scheduler"], tp_size=2)


@pytest.mark.parametrize("case", ["plain", "adapter", "fp8", "int8", "int4"])
async def test_logprobs_are_near_those_of_one_rank(tmp_path: Path, case: str) -> None:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    sizes["intermediate_size"] = 512  # each rank has whole groups of int4
    model = tmp_path / "model"
    save_model("llama", model, dtype=torch.bfloat16, **sizes)
    options: dict[str, Any] = {"quantization": case} if case in {"fp8", "int8", "int4"} else {}
    adapter = None
    if case == "adapter":
        adapter = str(write_adapter(tmp_path / "adapter", model, rank=8, seed=0))
        options["lora_paths"] = [adapter]
    results: list[list[float]] = []
    for tp_size in (1, 2):
        async with AsyncEngine(
            str(model), device=DEVICE, skip_tokenizer_init=True, tp_size=tp_size, **options
        ) as engine:
            answer = await engine.async_generate(
                input_ids=[place * place % 260 for place in range(300)],
                sampling_params={"max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
                lora_path=adapter,
            )
            results.append([logprob or 0.0 for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]])
    one_rank, two = map(torch.tensor, results)
    assert len(one_rank) == 299
    # the inputs of fp8 products get scales by row, and a rank has a part of a row
    assert (one_rank - two).abs().mean() < (0.3 if case == "fp8" else 0.1)
    assert one_rank.std() > 1, "the logprobs of tokens differ"


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
async def test_answers_with_drafts_are_those_without(tmp_path: Path, algorithm: str) -> None:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    save_model("qwen3", tmp_path, dtype=torch.bfloat16, **sizes)
    draft = {"speculative_draft_model_path": str(tmp_path)} if algorithm == "STANDALONE" else {}
    plain, _ = await answers(tmp_path, tp_size=2)
    drafted, stats = await answers(tmp_path, tp_size=2, speculative_algorithm=algorithm, **draft)
    assert stats["num_proposed_drafts"] > 0
    assert drafted == plain
