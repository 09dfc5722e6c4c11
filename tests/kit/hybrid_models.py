"""Small random models with recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig


def save_hybrid(config: PreTrainedConfig, folder: Path) -> Path:
    """Save a model with large random weights, and return the folder."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
