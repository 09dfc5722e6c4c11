"""Loading new weights into a running model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine import models
from aioengine.models._base import Model
from aioengine.protocol.messages import Control, Reply
from aioengine.runner import weights
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import Stepper, options
from tests.kit.decoders import config_of

PROMPTS = [[5, 9, 200, 31, 7], [1, 2, 3], list(range(20, 60))]


def save_pair(folder: Path, family: str, *, dtype: torch.dtype, tied: bool) -> tuple[Path, Path]:
    """Save two checkpoints with one config. The second has flipped and scaled weights of the first."""
    first, second = folder / "first", folder / "second"
    save_model(family, first, dtype=dtype, tie_word_embeddings=tied)
    shutil.copytree(first, second)
    tensors = load_file(second / "model.safetensors")
    changed = {name: (tensor.flip(0) * 1.5).contiguous() for name, tensor in tensors.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    return first, second


def reload(model: Model, folder: Path) -> None:
    """Load new weights from a folder."""
    model.open_for_loading()
    try:
        weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    except ValueError:
        model.finish_loading()
        raise


def load_weights(model: Model, control: Control) -> Reply:
    """Answer a control call with the folder of new weights."""
    reload(model, Path(str(control.arguments["folder"])))
    return Reply(control.call_id, success=True)


def logits_of(model: Model) -> Tensor:
    return Stepper(model).run(PROMPTS[2], [30, 1, 3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_running_model_gets_new_weights_between_two_steps(family: str, tied: bool, dtype: str, tmp_path: Path) -> None:
    first, second = save_pair(tmp_path, family, dtype=getattr(torch, dtype), tied=tied)
    old, new = (World(make_settings(folder, dtype=dtype)) for folder in (first, second))
    old_logits, new_logits = logits_of(old.runner._model), logits_of(new.runner._model)
    assert not torch.equal(old_logits, new_logits)
    world = World(make_settings(first, dtype=dtype, depth=1))
    assert world.answers(PROMPTS) == old.answers(PROMPTS)
    world.submit(PROMPTS[0], max_new_tokens=30)
    for _ in range(5):
        world.step()
    message, replies = Control(7, "load_weights", {"folder": str(second)}), list[Reply]()
    runner = world.runner
    runner.controls["load_weights"] = lambda control: load_weights(runner._model, control)
    world.core.call_between_steps(lambda: replies.append(runner.controls[message.name](message)))
    world.run()
    assert [reply.call_id for reply in replies] == [7]
    assert world.core.scheduler.cache.clear()
    assert torch.equal(logits_of(world.runner._model), new_logits)
    assert world.answers(PROMPTS) == new.answers(PROMPTS)
    assert {ended.message for ended in world.ended.values()} == {""}


def test_reloaded_weights_keep_their_addresses(tmp_path: Path) -> None:
    """CUDA graphs contain the addresses. On a CPU, only weights in float16 are not packed."""
    folders = save_pair(tmp_path, "qwen2", dtype=torch.float16, tied=False)
    config = json.loads((folders[0] / "config.json").read_text())
    in_place, new = (models.build(config, options(dtype=torch.float16, max_positions=64)) for _ in range(2))
    addresses: list[dict[str, int]] = []
    for folder in folders:
        addresses.append({name: target.tensor.data_ptr() for name, target in in_place.weights().items()})
        weights.load(in_place, folder, load_format="auto", seed=0, report=lambda done, total: None)
        in_place.open_for_loading()
    in_place.finish_loading()
    weights.load(new, folders[1], load_format="auto", seed=0, report=lambda done, total: None)
    assert torch.equal(logits_of(in_place), logits_of(new))
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refused_weights_leave_the_model_unchanged(dtype: str, tmp_path: Path) -> None:
    first, second = save_pair(tmp_path, "qwen2", dtype=getattr(torch, dtype), tied=False)
    model = World(make_settings(first, dtype=dtype)).runner._model
    expected = logits_of(model)
    tensors = load_file(second / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, second / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        reload(model, second)
    assert torch.equal(logits_of(model), expected)


def test_single_weights_can_be_replaced(tmp_path: Path) -> None:
    first, second = save_pair(tmp_path, "qwen2", dtype=torch.float32, tied=False)
    model = World(make_settings(first)).runner._model
    for name, tensor in load_file(second / "model.safetensors").items():
        model.open_for_loading()
        model.weights()[name].tensor.copy_(tensor)
        model.finish_loading()
    assert torch.equal(logits_of(model), logits_of(World(make_settings(second)).runner._model))


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "gemma3_text", "glm4", "stablelm side by side", "olmo2"])
def test_reopened_weights_are_in_checkpoint_order(case: str) -> None:
    model = models.build(config_of(case).to_dict(), options(max_positions=64))
    given: dict[str, Tensor] = {}
    for name, target in model.weights().items():
        given[name] = torch.randn(target.shape)
        target.tensor.copy_(given[name])
    model.finish_loading()
    prompt = torch.randint(0, model.vocab_size, (20,)).tolist()
    expected = Stepper(model).run(prompt, [20])
    model.open_for_loading()
    for name, target in model.weights().items():
        assert torch.equal(target.tensor, given[name]), name
    model.finish_loading()
    assert torch.equal(Stepper(model).run(prompt, [20]), expected)
