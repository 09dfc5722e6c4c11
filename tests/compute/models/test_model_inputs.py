"""Models with other inputs than token ids, and models that do not generate. The plug-ins exist only in tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import LlamaConfig

from aioengine import models
from aioengine.protocol.messages import Sampling
from tests.compute.models.model_plugins import three_axes_llama
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import make_inputs, options
from tests.kit.tiny_sizes import SIZES

PLUGINS = Path(__file__).parent / "model_plugins"
PROMPTS = [[5, 9, 200, 31, 7, 8, 150], [3] * 40, [77], [250, 11, 12]]
SAMPLINGS = [Sampling(7, temperature=0.0), Sampling(8), Sampling(9, top_k=4), Sampling(10, temperature=0.0)]


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(PLUGINS)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model("llama", tmp_path)
    return tmp_path


def set_model_type(folder: Path, model_type: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"model_type": model_type}))


@pytest.mark.parametrize("model_type", ["embedded_llama", "three_axes_llama"])
def test_other_inputs_give_same_tokens(folder: Path, model_type: str) -> None:
    settings = make_settings(folder, chunk_tokens=16, depth=1)
    expected = World(settings).answers(PROMPTS, SAMPLINGS)
    set_model_type(folder, model_type)
    assert World(settings).answers(PROMPTS, SAMPLINGS) == expected


def test_kv_cache_may_have_another_dtype_than_queries(folder: Path) -> None:
    settings = make_settings(folder, chunk_tokens=16)
    typed = structs.replace(settings, memory=structs.replace(settings.memory, kv_dtype="bfloat16"))
    plain, world = World(settings), World(typed)
    assert world.runner._pools[0].tensors[0].dtype == torch.bfloat16
    assert world.runner.facts["kv_pool_bytes"] == int(plain.runner.facts["kv_pool_bytes"]) // 2
    plain.answers(PROMPTS[:2], max_new_tokens=2)
    world.answers(PROMPTS[:2], max_new_tokens=2)
    expected = plain.runner._pools[0].tensors[0][0]
    rounded = world.runner._pools[0].tensors[0][0]
    assert torch.equal(rounded, expected.bfloat16()), "the first layer has the same K and V, rounded"
    world.submit(PROMPTS[3])
    world.run()


def test_model_can_read_rows_of_tokens(folder: Path) -> None:
    set_model_type(folder, "three_axes_llama")
    world = World(make_settings(folder))
    for prompt in ([1, 2, 3], [4] * 5, [6]):
        world.submit(prompt)
    model = world.runner._model
    rows: list[list[int]] = []
    while world.core.has_work and len(rows) < 2:
        world.step()
        rows.append(getattr(model, "rows"))  # noqa: B009
    assert rows == [[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 2]]
    world.run()


def test_architecture_without_known_task_is_refused() -> None:
    config = {**LlamaConfig(**SIZES).to_dict(), "architectures": ["LlamaForTokenClassification"]}
    with pytest.raises(ValueError, match="architectures .*LlamaForTokenClassification.* allowed: ...ForCausalLM"):
        models.build(config, options())


def test_rows_are_passed_only_to_models_that_read_them() -> None:
    config = LlamaConfig(**SIZES).to_dict()
    plain = models.build({**config, "model_type": "llama"}, options())
    three = three_axes_llama.PLUGIN(config, options())
    assert make_inputs(plain, [(0, 2), (4, 1)]).rows is None
    inputs = make_inputs(three, [(0, 2), (4, 1)])
    assert inputs.positions.tolist() == [[0, 1, 4]] * 3
    assert inputs.rows is not None
