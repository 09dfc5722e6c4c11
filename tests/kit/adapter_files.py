"""Write adapter folders in the format of peft. peft need not be installed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from aioengine.families._tensors import adaptable_layers
from aioengine.families.llama import LlamaFamily
from aioengine.model_files.adapter_folder import CONFIG, TENSORS

if TYPE_CHECKING:
    from pathlib import Path


def write_adapter(folder: Path, model: Path, *, rank: int, seed: int) -> Path:
    """Write a random adapter for all projections of the Llama in the folder ``model``."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    layers = adaptable_layers(LlamaFamily.read(json.loads((model / "config.json").read_text())))
    for name, (num_outputs, num_inputs) in layers.items():
        for half, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            numbers = torch.randn(shape, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers
    save_file(tensors, folder / TENSORS)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder
