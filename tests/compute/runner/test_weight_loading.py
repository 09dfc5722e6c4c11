"""New weights of a runner: each kind of layer computes as in a model that was loaded with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine.protocol.messages import Control
from aioengine.protocol.weight_messages import WeightCall
from aioengine.runner import build, trainer_group, weight_loading
from aioengine.runner.weight_loading import WeightsBrokenError
from aioengine.runner.weight_reading import check_all
from aioengine.settings.config import LoadedWeights
from tests.compute.quantized import METHODS, quantize_checkpoint
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import Stepper

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from aioengine.protocol.messages import Reply
    from aioengine.runner.graphs.piece_graphs import PieceGraphs
    from aioengine.settings.config import Settings

PROMPT = list(range(20, 60))


def save_pair(family: str, folder: Path, **changes: object) -> tuple[Path, Path]:
    """Save two checkpoints with one config. The second has flipped and scaled weights of the first."""
    first, second = folder / "first", folder / "second"
    for path in (first, second):
        save_model(family, path, **changes)
    tensors = load_file(second / "model.safetensors")
    changed = {name: (tensor.flip(0) * 1.25).contiguous() for name, tensor in tensors.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    return first, second


def logits_of(world: World) -> Tensor:
    return Stepper(world.runner._model).run(PROMPT, [30, 1, 3])


def call(world: World, name: str, path: Path, number: int = 1) -> Reply:
    loaded = LoadedWeights(version=f"v{number}", number=number, path=str(path))
    text = msgspec.json.encode(loaded).decode()
    return world.runner.controls[name](Control(3, name, {"path": str(path), "weights": text}))


def quantized(settings: Settings, method: str) -> Settings:
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, quantization=method))


@pytest.mark.parametrize(
    ("family", "changes", "quantization"),
    [
        ("llama", {}, ""),
        ("llama", {}, "int8"),
        ("qwen2", {"tie_word_embeddings": True}, ""),
        ("qwen2", {"tie_word_embeddings": True}, "int4"),
        ("qwen3", {}, "fp8"),
        ("gemma3_text", {}, ""),
        ("gpt_oss", {}, ""),
        ("deepseek_v3", {}, ""),
        ("deepseek_v3", {}, "int8"),
    ],
)
def test_new_weights_are_those_of_a_new_model(
    family: str, changes: dict[str, object], quantization: str, tmp_path: Path
) -> None:
    first, second = save_pair(family, tmp_path, **changes)
    world, new = (World(quantized(make_settings(folder), quantization)) for folder in (first, second))
    old, expected = logits_of(world), logits_of(new)
    assert not torch.equal(old, expected)
    assert call(world, WeightCall.CHECK, second).success
    assert torch.equal(logits_of(world), old)
    reply = call(world, WeightCall.LOAD, second)
    assert reply.success, reply.message
    assert torch.equal(logits_of(world), expected)
    assert world.runner.facts["weight_version"] == "v1"


def test_a_call_that_arrives_twice_loads_once(tmp_path: Path) -> None:
    first, second = save_pair("llama", tmp_path)
    world = World(make_settings(first))
    assert call(world, WeightCall.LOAD, second).success
    expected = logits_of(world)
    assert call(world, WeightCall.LOAD, first).success  # the same number
    assert torch.equal(logits_of(world), expected)


def test_files_that_change_while_they_are_checked_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = save_pair("llama", tmp_path)
    world = World(make_settings(first))

    def check_and_change(*arguments: Any) -> None:
        check_all(*arguments)
        (second / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes())

    monkeypatch.setattr(weight_loading, "check_all", check_and_change)
    reply = call(world, WeightCall.CHECK, second)
    assert not reply.success
    assert "was changed while it was checked" in reply.message


def test_failure_while_weights_are_replaced_ends_the_process(tmp_path: Path) -> None:
    first, second = save_pair("llama", tmp_path)
    world = World(make_settings(first))
    assert call(world, WeightCall.CHECK, second).success
    tensors = load_file(second / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.full((300, 64), torch.inf)}, second / "model.safetensors")
    with pytest.raises(WeightsBrokenError, match=r"lm_head\.weight has numbers that are not finite"):
        call(world, WeightCall.LOAD, second)


def test_files_that_change_after_their_check_end_the_process(tmp_path: Path) -> None:
    first, second = save_pair("llama", tmp_path)
    world = World(make_settings(first))
    old = logits_of(world)
    files = json.loads(call(world, WeightCall.CHECK, second).data)
    (second / "model.safetensors").write_bytes((first / "model.safetensors").read_bytes())
    loaded = LoadedWeights(number=1, path=str(second), files=files)
    control = Control(3, WeightCall.LOAD, {"path": str(second), "weights": msgspec.json.encode(loaded).decode()})
    with pytest.raises(WeightsBrokenError, match="was changed after it was checked"):
        world.runner.controls[WeightCall.LOAD](control)
    assert torch.equal(logits_of(world), old)


LAYER = "model.layers.1.mlp.down_proj"
ORDER = f"{LAYER}.g_idx"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


def save_quantized(folder: Path, tensors: dict[str, Tensor], method: str) -> None:
    """Save a checkpoint. Its model is in the folder."""
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": METHODS[method].config}
    (folder / "config.json").write_text(json.dumps(raw))


def quantized_pair(method: str, folder: Path) -> tuple[Path, Path, dict[str, Tensor]]:
    """Save two equal models, of which the first is quantized. Return their folders, and the quantized tensors."""
    first, second = folder / "first", folder / "second"
    for path in (first, second):
        save_model("qwen2", path, tie_word_embeddings=False, intermediate_size=128)
    tensors, _ = quantize_checkpoint(load_file(first / "model.safetensors"), METHODS[method])
    save_quantized(first, tensors, method)
    return first, second, tensors


def as_text(**state: object) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@dataclass
class FakeGroup:
    """A process group whose rank 0 broadcasts these tensors."""

    tensors: dict[str, Tensor]

    def receive(self, _: object) -> dict[str, Tensor]:
        return self.tensors


def receive(world: World, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Reply:
    """Let the runner join a group, and receive tensors."""
    monkeypatch.setattr(trainer_group, "TrainerGroup", lambda *_, **options: FakeGroup(tensors))
    group = {"group": "trainer", "backend": "gloo", "address": "127.0.0.1", "port": 1}
    join = Control(1, WeightCall.JOIN_GROUP, group | {"rank_offset": 1, "world_size": 2})
    assert world.runner.controls[WeightCall.JOIN_GROUP](join).success
    control = Control(2, WeightCall.RECEIVE, {"group": "trainer", "tensors": "[]"})
    return world.runner.controls[WeightCall.RECEIVE](control)


@pytest.mark.parametrize(
    ("method", "name", "values", "message"),
    [
        ("gptq-order", ORDER, torch.full((128,), 3, dtype=torch.int32), "the groups of its inputs (g_idx) do not have"),
        ("gptq-order", ORDER, torch.arange(128).int() // 32 + 1, "the groups of its inputs (g_idx) do not have 32"),
        ("packed-order", f"{LAYER}.weight_g_idx", torch.full((128,), -1).int(), "the groups of its inputs (g_idx) do"),
        ("nf4-double", STATE, torch.full((9,), 120).byte(), "a quant_state of bitsandbytes is damaged"),
        (
            "nf4-double",
            STATE,
            as_text(blocksize=128, nested_blocksize=256, nested_offset=0.5),
            "bitsandbytes has blocks of 128 and 256; allowed: 64 and 256",
        ),
    ],
)
def test_wrong_values_of_quantized_layers_are_refused_by_the_check(
    method: str, name: str, values: Tensor, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, tensors = quantized_pair(method, tmp_path)
    world = World(make_settings(first))
    old = logits_of(world)
    save_quantized(second, tensors | {name: values}, method)
    save_file({name: values}, tmp_path / "part.safetensors")
    part = {"path": str(tmp_path / "part.safetensors"), "is_part": True}
    replies = [
        call(world, WeightCall.CHECK, second),
        world.runner.controls[WeightCall.CHECK](Control(4, WeightCall.CHECK, part)),
        receive(world, {name: values}, monkeypatch),
    ]
    for reply in replies:
        assert not reply.success
        assert reply.message.startswith(f"{LAYER}: {message}")
    assert torch.equal(logits_of(world), old)


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("gptq-order", {ORDER: torch.arange(128).int() // 32}),
        ("gptq-order", {"model.layers.1.self_attn.q_proj.g_idx": torch.zeros(64).int()}),
        ("nf4-double", {STATE: as_text(blocksize=64, nested_blocksize=256, nested_offset=0.25)}),
    ],
)
def test_parts_of_quantized_layers_are_replaced(
    method: str, values: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, tensors = quantized_pair(method, tmp_path)
    world = World(make_settings(first))
    old = logits_of(world)
    save_quantized(second, tensors | values, method)
    expected = logits_of(World(make_settings(second)))
    assert not torch.equal(old, expected)
    assert receive(world, values, monkeypatch).success
    load = Control(5, WeightCall.LOAD, {"received": True})
    assert world.runner.controls[WeightCall.LOAD](load).success
    assert torch.equal(logits_of(world), expected)


def test_packed_integers_are_returned_exactly(tmp_path: Path) -> None:
    first, _, tensors = quantized_pair("gptq-order", tmp_path)
    name = f"{LAYER}.qweight"
    control = Control(1, WeightCall.GET, {"name": name, "num_rows": 2})
    reply = World(make_settings(first)).runner.controls[WeightCall.GET](control)
    assert json.loads(reply.data) == tensors[name][:2].tolist()


def test_a_tensor_without_dimensions_is_returned_as_one_row(tmp_path: Path) -> None:
    first, _, tensors = quantized_pair("fp8", tmp_path)
    name = f"{LAYER}.weight_scale"
    world = World(make_settings(first))
    expected = logits_of(world)
    reply = world.runner.controls[WeightCall.GET](Control(1, WeightCall.GET, {"name": name, "num_rows": 2}))
    assert json.loads(reply.data) == [tensors[name].item()]
    assert torch.equal(logits_of(world), expected), "the layer can be used again"


def test_memory_is_released_only_if_the_engine_was_configured_for_it(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    reply = World(make_settings(tmp_path)).runner.controls[WeightCall.RELEASE_MEMORY](
        Control(1, WeightCall.RELEASE_MEMORY, {"tags": []})
    )
    assert not reply.success
    assert "give its constructor enable_memory_saver=True" in reply.message


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_graphs_are_captured_again_when_all_memory_is_resumed(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen2", tmp_path, tie_word_embeddings=True)
    settings = quantized(make_settings(tmp_path), "int4")
    world = World(msgspec.structs.replace(settings, memory=msgspec.structs.replace(settings.memory, can_release=True)))
    captures: list[object] = []
    monkeypatch.setattr(build, "capture_graphs", lambda runner, parts, report: captures.append(runner))
    world.runner.prompt_graphs = cast("PieceGraphs", object())  # a CPU has none
    workspace = world.runner._workspace = torch.ones(64)
    expected = logits_of(world)

    def change(name: str, tags: list[str]) -> None:
        assert world.runner.controls[name](Control(1, name, {"tags": tags})).success

    change(WeightCall.RELEASE_MEMORY, ["kv_cache"])
    assert world.runner.has_graphs
    change(WeightCall.RELEASE_MEMORY, ["weights"])
    assert not world.runner.has_graphs
    assert workspace.untyped_storage().nbytes() == 0
    change(WeightCall.RESUME_MEMORY, order[:1])
    assert not captures
    change(WeightCall.RESUME_MEMORY, order[1:])
    assert captures == [world.runner]
    assert torch.equal(workspace, torch.zeros(64))
    assert torch.equal(logits_of(world), expected)
    change(WeightCall.RELEASE_MEMORY, ["kv_cache"])
    change(WeightCall.RESUME_MEMORY, ["kv_cache"])
    assert len(captures) == 1
