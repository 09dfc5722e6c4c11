"""Adapters of tiny models, created and saved by peft."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TENSORS = "adapter_model.safetensors"


def save_adapter(model: PreTrainedModel, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save an adapter with large random weights by peft. ``model`` is unchanged afterwards."""
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of models that are not on the hub
        adapted = get_peft_model(model, LoraConfig(**{**options, **config}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        adapted.save_pretrained(str(folder))
        adapted.unload()
    vars(model).pop("peft_config", None)
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapter into the weights of ``model`` by peft. This cannot be undone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload().eval()


def change_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of an adapter. A key is the end of a name, or a complete new name."""
    tensors = load_file(folder / TENSORS)
    for end, tensor in changes.items():
        name = next((name for name in tensors if name.endswith(end)), end)
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / TENSORS)
