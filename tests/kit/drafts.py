"""Models with draft models whose drafts are always accepted."""

from __future__ import annotations

import copy
import shutil
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from aioengine.model_files.model_folder import DEMO_MODEL

if TYPE_CHECKING:
    from pathlib import Path


def save_with_draft(model: Any, folder: Path, draft_folder: Path) -> None:
    """Change ``model`` of transformers so that only its first layer has an effect, and save it and this layer.

    The layer with the same embedding, norm and head is a draft model with the same logits.
    """
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    draft = copy.deepcopy(model)
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = draft.config.layer_types[:1]
    draft.save_pretrained(draft_folder)


def save_demo_with_draft(folder: Path) -> tuple[Path, Path]:
    """Save the demo model with a draft model to folders in ``folder``, and return them."""
    folders = folder / "model", folder / "draft"
    for copied in folders:
        shutil.copytree(DEMO_MODEL, copied)
    save_with_draft(AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32), *folders)
    return folders
