"""``plan()`` computes the memory of vision towers and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aioengine
from aioengine.runner.lora.pool import slots_bytes
from aioengine.settings.config import LoraSettings
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.vision_models import MODELS, save_vision_model


@pytest.mark.parametrize("model_type", MODELS)
def test_plan_counts_the_parameters_of_vision_models(model_type: str, tmp_path: Path) -> None:
    theirs = save_vision_model(model_type, tmp_path)
    plan = aioengine.plan(tmp_path, device="cpu", dtype="float32")
    assert plan.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())


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
