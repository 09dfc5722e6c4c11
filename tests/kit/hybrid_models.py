"""Small random models with recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.decoders import random_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig


def save_hybrid(config: PreTrainedConfig, folder: Path) -> Path:
    """Save a random model to the folder, and return the folder."""
    random_model(config, seed=7).save_pretrained(folder)
    return folder
