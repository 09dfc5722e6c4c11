"""A complete engine with the demo model in quantized checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import aioengine
from aioengine import Engine
from aioengine.model_files.model_folder import DEMO_MODEL
from tests.compute.quantized import METHODS, quantize_checkpoint, rounded
from tests.kit.adapters import save_adapter

pytestmark = pytest.mark.process

PROMPTS = ["The capital of France is", "Once upon a time"]
GREEDY = {"temperature": 0, "max_new_tokens": 24}


def save_demo(folder: Path, name: str) -> tuple[Path, Path]:
    """Save the demo model quantized, and with the weights that it stands for."""
    method = METHODS[name]
    paths = folder / "quantized", folder / "plain"
    for path, tensors in zip(
        paths, quantize_checkpoint(load_file(DEMO_MODEL / "model.safetensors"), method), strict=True
    ):
        shutil.copytree(DEMO_MODEL, path)
        save_file(tensors, path / "model.safetensors")
    config = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps(config | {"quantization_config": method.config}))
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("awq", 1), ("awq", 2), ("gptq-8", 1), ("fp8-blocks", 1), ("fp8", 2), ("nf4-double", 1)]
)
def test_answers_equal_the_dequantized_model_also_after_a_lost_scheduler(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    quantized, plain = save_demo(tmp_path, name)
    with Engine(plain, device="cpu", dtype="float32") as engine:
        expected = [answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)]
    options: dict[str, Any] = {"quantization": METHODS[name].config["quant_method"], "tp_size": num_ranks}
    with Engine(quantized, device="cpu", dtype="float32", **options) as engine:
        assert [answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)] == expected
        [scheduler] = [process for process in engine.health()["processes"] if process["role"] == "scheduler"]
        os.kill(scheduler["pid"], signal.SIGKILL)
        assert [answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)] == expected


def save_rounded(folder: Path, method: str, group: int) -> Path:
    """Save the demo model with the weights of quantization while loading. Its head is the embedding table."""
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = rounded(tensor, method, group)
        elif name == "model.embed_tokens.weight":
            tensors[name] = rounded(tensor, "int8")
    shutil.copytree(DEMO_MODEL, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("method", "group", "num_ranks"), [("int8", 0, 1), ("int4", 64, 1), ("int4", 64, 2)])
def test_answers_with_quantization_while_loading_equal_those_of_rounded_weights(
    method: str, group: int, num_ranks: int, tmp_path: Path
) -> None:
    """With adapters and hidden states too. Two ranks have the same groups of 64 inputs as one."""
    base = AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32).eval()
    adapter = save_adapter(base, tmp_path / "adapter", r=4)
    plain = save_rounded(tmp_path / "plain", method, group)

    def answers(engine: Engine) -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)]

    def states(engine: Engine) -> np.ndarray:
        """Return the last hidden state with and without the adapter."""
        params: dict[str, object] = {"temperature": 0, "max_new_tokens": 1}
        paths = [str(adapter), None]
        results = engine.generate([PROMPTS[0]] * 2, params, lora_path=paths, return_hidden_states="last")
        return np.stack([result["meta_info"]["hidden_states"][0] for result in results])

    arguments: dict[str, Any] = {"device": "cpu", "dtype": "float32", "lora_paths": [str(adapter)]}
    with Engine(plain, **arguments) as engine:
        expected, expected_states = answers(engine), states(engine)
    options: dict[str, Any] = {"quantization_group_size": group} if group else {}
    options["tp_size"] = num_ranks
    with Engine(quantization=method, **options, **arguments) as engine:
        assert answers(engine) == expected
        np.testing.assert_allclose(states(engine), expected_states, atol=1e-2 if method == "int8" else 5e-2, rtol=1e-3)


@pytest.mark.slow
def test_adapters_hidden_states_and_logprobs_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    demo = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    adapter = save_adapter(demo, tmp_path / "adapter", r=4)
    answers: list[list[dict[str, Any]]] = []
    for folder in save_demo(tmp_path, "gptq-8"):
        with Engine(folder, device="cpu", dtype="float32", enable_lora=True, lora_paths={"a": str(adapter)}) as engine:
            answers.append(
                engine.generate(
                    [PROMPTS[0]] * 2,
                    GREEDY,
                    lora_path=["a", None],
                    return_hidden_states=True,
                    return_logprob=True,
                    logprob_start_len=0,
                )
            )
    for quantized, plain in zip(*answers, strict=True):
        assert quantized["output_ids"] == plain["output_ids"]
        logprobs = [answer["meta_info"]["input_token_logprobs"][1:] for answer in (quantized, plain)]
        assert logprobs[0] == [(pytest.approx(logprob, abs=1e-3), *rest) for logprob, *rest in logprobs[1]]
        for state, expected in zip(
            *(answer["meta_info"]["hidden_states"] for answer in (quantized, plain)), strict=True
        ):
            np.testing.assert_allclose(state, expected, atol=1e-2, rtol=1e-3)
    changed, unchanged = (answer["output_ids"] for answer in answers[0])
    assert changed != unchanged


@pytest.mark.slow
def test_quantized_models_run_with_transformers_code(tmp_path: Path) -> None:
    paths = save_demo(tmp_path, "gptq-8")
    options = {"model_impl": "transformers", "device": "cpu", "dtype": "float32"}
    plans = [aioengine.plan(path, **options) for path in paths]
    assert plans[1].num_parameters <= plans[0].num_parameters < 1.02 * plans[1].num_parameters
    answers: list[list[int]] = []
    for path in paths:
        with Engine(path, **options) as engine:
            answers.append([answer["output_ids"] for answer in engine.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


def test_plan_counts_the_bytes_in_memory(tmp_path: Path) -> None:
    quantized, plain = save_demo(tmp_path, "awq")
    plans = [aioengine.plan(path, device="cpu", dtype="bfloat16") for path in (quantized, plain)]
    saved = plans[1].weights_bytes - plans[0].weights_bytes
    num_linear = 4 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 896)
    scales, zero_points, factors = num_linear // 32 * 4, num_linear // 32 // 2, num_linear // 32 * 2 * 2
    assert saved == num_linear * 2 - num_linear // 2 - scales - zero_points - factors
    fp8, _ = save_demo(tmp_path / "fp8", "fp8-blocks")
    on_cpu = aioengine.plan(fp8, device="cpu", dtype="bfloat16").weights_bytes
    assert plans[1].weights_bytes <= on_cpu < 1.02 * plans[1].weights_bytes  # converted to bfloat16


def test_another_method_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    quantized, plain = save_demo(tmp_path, "awq")
    with pytest.raises(ValueError, match="quantization='gptq', but the model has 'awq'; leave it out"):
        Engine(quantized, device="cpu", quantization="gptq")
    with pytest.raises(ValueError, match="quantization='int8', but the model has 'awq'; leave it out"):
        Engine(quantized, device="cpu", quantization="int8")
    with pytest.raises(ValueError, match="no quantization_config; leave it out, or quantize .* 'fp8', 'int8', 'int4'"):
        Engine(plain, device="cpu", quantization="gptq")
