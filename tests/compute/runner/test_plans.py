"""``plan()`` computes the memory of vision towers and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import aioengine
from aioengine.families._towers import num_tower_parameters
from aioengine.runner.lora.pool import slots_bytes
from aioengine.settings.config import LoraSettings
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.vision_models import MODELS, save_vision_model

TOWERS = "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector."
CLIP_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def num_parameters(model: Any, prefixes: tuple[str, ...]) -> int:
    return sum(each.numel() for name, each in model.named_parameters() if any(part in name for part in prefixes))


@pytest.mark.parametrize("model_type", MODELS)
def test_plan_counts_the_parameters_of_vision_models(model_type: str, tmp_path: Path) -> None:
    theirs = save_vision_model(model_type, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    plan = aioengine.plan(tmp_path, device="cpu", dtype="float32")
    assert plan.num_parameters == num_parameters(theirs, ("",))


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": model_type} for model_type in MODELS if model_type != "llava"),
        {"model_type": "llava", "vision_config": CLIP_LARGE},
        {
            "model_type": "llava",
            "vision_config": {"model_type": "siglip_vision_model"},
            "vision_feature_layer": [-2, -5],
        },
    ],
)
def test_towers_have_the_default_sizes_of_transformers(config: dict[str, Any]) -> None:
    theirs = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs)
    assert num_tower_parameters(config, theirs.text_config.hidden_size) == num_parameters(model, TOWERS)


def test_impossible_tower_is_refused() -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {"depth": "many"}}
    with pytest.raises(ValueError, match="vision_config.*depth"):
        num_tower_parameters(config, 8)


@pytest.mark.parametrize(("modules", "rank"), [((), 20), (("q_proj", "down_proj"), 16)])
def test_plan_has_the_size_of_adapter_slots(modules: tuple[str, ...], rank: int, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    plan = aioengine.plan(
        tmp_path, **options, enable_lora=True, max_lora_rank=rank, lora_target_modules=list(modules) or "all"
    )
    model = World(make_settings(tmp_path)).runner._model
    lora = LoraSettings(num_slots=8, max_rank=rank, modules=modules)
    planned = plan.activations_bytes - aioengine.plan(tmp_path, **options).activations_bytes
    tables = slots_bytes(model.linears(), lora, torch.float32) - planned
    assert 0 < tables < 8 * 4 * 2000
