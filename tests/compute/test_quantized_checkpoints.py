"""Checkpoints of every quantization method are read, and computed like the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine import models, plugins
from aioengine.model_files.checkpoint import check_folder
from aioengine.model_files.quantization import split_config
from aioengine.models._base import Model, ModelOptions
from aioengine.quantization.stored import formats
from aioengine.runner import weights
from tests.compute.quantized import METHODS, quantize_checkpoint
from tests.compute.runner_world import save_model
from tests.compute.stepping import Stepper

CPU = torch.device("cpu")
PROMPT = [5, 9, 200, 31, 7, 8, 150]


def loaded(folder: Path, tensors: dict[str, Tensor], quantization: object, dtype: torch.dtype) -> Model:
    """Save a checkpoint of this folder's model, check it, and load it."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    config, found = split_config(raw)
    check_folder(folder, plugins.load("families", "qwen2").read(config), found)
    options = ModelOptions(dtype=dtype, device=CPU, max_positions=64)
    if found is not None:
        options = ModelOptions(dtype=dtype, device=CPU, max_positions=64, format_of=formats(found))
    model = models.build(config, options)
    weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False)
    quantized, plain = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method)
    expected = Stepper(loaded(tmp_path, plain, None, torch.float32)).run(PROMPT, [4, 2])
    result = Stepper(loaded(tmp_path, quantized, method.config, torch.float32)).run(PROMPT, [4, 2])
    if name == "w8a8":  # it rounds activations, too
        assert (result - expected).norm() < 0.05 * expected.norm()
    else:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
