"""Reading checkpoints: all supported formats, and the errors for others."""

from __future__ import annotations

import json
import os
import re
import weakref
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from aioengine import models
from aioengine.layers.layer import Shard, Slice, Target
from aioengine.model_files.model_folder import find_facts
from aioengine.runner import weight_reading, weights
from aioengine.settings.config import ModelConfig
from tests.compute.runner_world import World, make_settings, save_model
from tests.compute.stepping import options
from tests.kit.tiny_sizes import CONTEXT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PROMPT = [5, 9, 200, 31, 7]


class FakeModel:
    prefix = ""
    renamed: tuple[tuple[str, str], ...] = ()
    """Two parameters. One is a view of a larger tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.fused = torch.zeros(6, 4, dtype=dtype)
        self.norm = torch.zeros(4, dtype=dtype)
        self.is_finished = False

    def weights(self) -> dict[str, Target]:
        parts = {"up.weight": self.fused[:2], "down.weight": self.fused[2:], "norm.weight": self.norm}
        return {name: Target(tensor) for name, tensor in parts.items()}

    def is_ignored(self, name: str) -> bool:
        return name.endswith("inv_freq")

    def finish_loading(self) -> None:
        self.is_finished = True


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (2, 4), "down.weight": (4, 4), "norm.weight": (4,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def load(model: FakeModel, folder: Path, load_format: str = "auto") -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    weights.load(model, folder, load_format=load_format, seed=0, report=lambda done, total: seen.append((done, total)))
    return seen


def save_shards(folder: Path, parts: dict[str, dict[str, Tensor]]) -> None:
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_single_file_loads_in_all_dtypes(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    given = tensors(stored)
    save_file({**given, "rotary.inv_freq": torch.ones(3)}, tmp_path / "model.safetensors")
    model = FakeModel(wanted)
    seen = load(model, tmp_path)
    assert model.is_finished
    assert torch.equal(model.fused, torch.cat([given["up.weight"], given["down.weight"]]).to(wanted))
    assert torch.equal(model.norm, given["norm.weight"].to(wanted))
    size = sum(tensor.nbytes for tensor in given.values())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_parameters_are_freed_before_finish_loading(tmp_path: Path) -> None:
    class Repacking(FakeModel):
        def finish_loading(self) -> None:
            remembered = weakref.ref(self.norm)
            self.norm = torch.zeros(0)
            self.is_finished = remembered() is None

    save_file(tensors(), tmp_path / "model.safetensors")
    model = Repacking()
    load(model, tmp_path)
    assert model.is_finished, "somebody still holds a parameter, so loading would need the memory twice"


def test_shards_are_read_by_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 1)  # every row is a piece of its own
    given = tensors()
    parts = {"a.safetensors": {"up.weight": given["up.weight"]}}
    parts["b.safetensors"] = {name: given[name] for name in ("down.weight", "norm.weight")}
    save_shards(tmp_path, parts)
    save_file({"something.else": torch.ones(1)}, tmp_path / "consolidated.safetensors")  # not in the index: not read
    model = FakeModel()
    load(model, tmp_path)
    assert torch.equal(model.fused, torch.cat([given["up.weight"], given["down.weight"]]))
    assert torch.equal(model.norm, given["norm.weight"])


def test_default_file_is_read_without_an_index(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    save_file({"layers.0.other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    model = FakeModel()
    load(model, tmp_path)
    assert model.is_finished


def check_refused(folder: Path, *words: str) -> None:
    model = FakeModel()
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        load(model, folder)
    for word in words:
        assert word in str(caught.value), caught.value
    assert not model.is_finished
    assert not model.fused.any(), "something was written before everything was checked"


def test_mismatched_tensors_are_named(tmp_path: Path) -> None:
    given = tensors()
    save_file(
        {"up.weight": given["up.weight"], "norm.weight": torch.ones(5), "x": torch.ones(1)}, tmp_path / "m.safetensors"
    )
    check_refused(tmp_path, "missing: down.weight", "not expected by this model: x", "norm.weight has shape [5]", "[4]")


def test_odd_tensor_names_are_escaped_in_errors(tmp_path: Path) -> None:
    given = tensors() | {"\x1b[31m": torch.ones(1), "x" * 1_000_000: torch.ones(1)}
    save_file(given, tmp_path / "model.safetensors")
    check_refused(tmp_path, r"'\x1b[31m', 'xxx", "(1000000 long)")
    with pytest.raises(ValueError, match="not expected") as caught:
        load(FakeModel(), tmp_path)
    assert len(str(caught.value)) < 500


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    given = tensors() | {"up.weight": torch.ones(2, 4, dtype=torch.int8)}
    save_file(given, tmp_path / "model.safetensors")
    check_refused(tmp_path, "up.weight is of type I8", "BF16")


def test_damaged_missing_and_duplicate_files_are_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a.safetensors": tensors()})
    (tmp_path / "a.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    check_refused(tmp_path, "cannot read", "a.safetensors")
    (tmp_path / "a.safetensors").unlink()
    check_refused(tmp_path, "cannot read", "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "x" * 5000}}))
    check_refused(tmp_path, "it names 'xxx", "not in the model folder")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "\u4f60" * 200}}))
    check_refused(tmp_path, "cannot be read: File name too long")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    check_refused(tmp_path, "model.safetensors.index.json: it names no files")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors(), tmp_path / "a.safetensors")
    save_file(tensors(), tmp_path / "b.safetensors")
    check_refused(tmp_path, "is in a.safetensors and in b.safetensors")


def test_folder_without_safetensors_is_refused_with_alternatives(tmp_path: Path) -> None:
    check_refused(tmp_path / "none", "has no weights")
    check_refused(tmp_path, "has no weights", "safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    check_refused(tmp_path, "pytorch_model.bin, which is not read", "save_pretrained")


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_large_tensors_are_read_in_pieces_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(weight_reading, "SMALL_BYTES", 0)
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    given = tensors()
    save_shards(tmp_path, {f"{name}.safetensors": {name: tensor} for name, tensor in given.items()})
    model = FakeModel(wanted)
    seen = load(model, tmp_path)
    assert torch.equal(model.fused, torch.cat([given["up.weight"], given["down.weight"]]).to(wanted))
    assert torch.equal(model.norm, given["norm.weight"].to(wanted))
    assert len(seen) > 5


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 15])
def test_nonfinite_weights_are_refused(tmp_path: Path, value: float, place: int) -> None:
    given = tensors()
    given["down.weight"].view(-1)[place] = value
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor down\.weight .* not finite in float32"):
        load(FakeModel(), tmp_path)


def test_weights_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    given = tensors() | {"norm.weight": torch.full((4,), 6e4)}
    save_file(given, tmp_path / "model.safetensors")
    model = FakeModel(torch.float16)
    load(model, tmp_path)  # their sum is too large for float16, and each of them is not
    assert torch.equal(model.norm, given["norm.weight"].half())
    given["norm.weight"][2] = 1e5
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight has numbers that are not finite in float16"):
        load(FakeModel(torch.float16), tmp_path)


@pytest.mark.parametrize("alone_bytes", [0, 1 << 20])
def test_files_that_change_during_loading_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_bytes: int
) -> None:
    monkeypatch.setattr(weight_reading, "SMALL_BYTES", alone_bytes)
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    whole = path.read_bytes()

    def check(change: Callable[[], object], message: str) -> None:
        path.write_bytes(whole)
        os.utime(path, (1, 1))
        model = FakeModel()
        is_changed = False

        def report(done: int, total: int) -> None:
            nonlocal is_changed
            if not is_changed:
                change()
            is_changed = True

        with pytest.raises(ValueError, match=message):
            weights.load(model, tmp_path, load_format="auto", seed=0, report=report)
        assert not model.is_finished

    check(path.unlink, "model.safetensors: it was removed")
    check(lambda: path.write_bytes(whole[:-20]), "model.safetensors was changed while it was read")
    check(lambda: os.utime(path), "model.safetensors was changed while it was read")

    def replace() -> None:
        (tmp_path / "new").write_bytes(whole[:-4] + b"abcd")
        os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        (tmp_path / "new").replace(path)

    check(replace, "model.safetensors was changed while it was read")


def test_dummy_weights_depend_only_on_seed_and_name() -> None:
    first, second, other = (FakeModel() for _ in range(3))
    weights.fill_dummy(first.weights(), seed=1)
    weights.fill_dummy(dict(reversed(second.weights().items())), seed=1)
    weights.fill_dummy(other.weights(), seed=2)
    assert torch.equal(first.fused, second.fused)
    assert not torch.equal(first.fused, other.fused)
    assert torch.equal(first.norm, torch.ones(4))
    large = torch.zeros(1500, 1024)
    weights.fill_dummy({"w": Target(large)}, seed=3)
    assert large.unique(dim=0).shape == large.shape
    assert large.std() == pytest.approx(1024**-0.5, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_and_bf16_checkpoints_of_transformers_load(tmp_path: Path, tied: bool) -> None:
    model = save_model("qwen2", tmp_path / "one", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    expected = (
        model.float().generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    )
    for name in ("one", "many"):
        assert World(make_settings(tmp_path / name)).answers([PROMPT], max_new_tokens=8) == [expected]


@pytest.mark.parametrize(
    ("family", "fields"),
    [("mistral", {"sliding_window": CONTEXT_LENGTH}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_model_with_window_as_long_as_context_loads(tmp_path: Path, family: str, fields: dict[str, object]) -> None:
    model = save_model(family, tmp_path, max_position_embeddings=4 * CONTEXT_LENGTH, **fields)
    prompt = list(range(10, 50)) * 5
    output = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    expected = output[0, len(prompt) :].tolist()
    assert World(make_settings(tmp_path)).answers([prompt], max_new_tokens=40) == [expected]


def test_dummy_model_runs_without_weights_and_is_reproducible(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    answers = [World(make_settings(tmp_path, load_format="dummy")).answers([PROMPT])[0] for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 2


def test_all_tensors_of_a_real_model_are_loaded(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = models.build(config, options())
    targets = model.weights()
    for target in targets.values():
        target.tensor.fill_(torch.nan)
    weights.load(model, tmp_path, load_format="safetensors", seed=0, report=lambda done, total: None)
    assert all(target.tensor.isfinite().all() for target in targets.values())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_folder_that_changed_since_startup_is_refused(tmp_path: Path, name: str) -> None:
    """Otherwise requests would continue with another model after lost processes are replaced."""
    save_model("llama", tmp_path)
    facts = find_facts(ModelConfig(path=str(tmp_path)))
    assert {Path(path).name for path in facts.weights.files} == {"config.json", "model.safetensors"}
    settings = make_settings(tmp_path)
    settings = replace(settings, model=replace(settings.model, files=facts.weights.files))
    World(settings)
    os.utime(tmp_path / name, (1, 1))
    with pytest.raises(ValueError, match=f"{name} was changed since the engine was created"):
        World(settings)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_slices_of_tensors_load_along_any_dimension(load_format: str, tmp_path: Path) -> None:
    """This is how two devices would each load half of a model."""

    class Whole(FakeModel):
        def weights(self) -> dict[str, Target]:
            return {"up.weight": Target(self.fused[:2]), "down.weight": Target(self.fused[2:])}

    class Half(Whole):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.up, self.down, self.rank = torch.zeros(1, 4), torch.zeros(4, 2), rank

        def weights(self) -> dict[str, Target]:
            up = Target(self.up, Slice(dim=0, ranges=((self.rank, self.rank + 1),), total=2))
            return {
                "up.weight": up,
                "down.weight": Target(self.down, Slice(dim=1, ranges=((2 * self.rank, 2 * self.rank + 2),), total=4)),
            }

    given = tensors()
    del given["norm.weight"]
    save_file(given, tmp_path / "model.safetensors")
    whole, halves = Whole(), [Half(0), Half(1)]
    for model in (whole, *halves):
        load(model, tmp_path, load_format)
    assert torch.equal(torch.cat([half.up for half in halves]), whole.fused[:2])
    assert torch.equal(torch.cat([half.down for half in halves], dim=1), whole.fused[2:])
    save_file({**given, "up.weight": torch.ones(1, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"up\.weight has shape \[1, 4\], and the model expects \[2, 4\]"):
        load(Half(1), tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_read_only_their_parts(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the dtypes of file and model differ. All ranks read norms."""
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 1000)
    save_model(family, tmp_path)
    num_bytes: list[int] = []
    read = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        size = read(fd, buffers, offset)
        num_bytes.append(size)
        return size

    monkeypatch.setattr(os, "preadv", counted)
    raw = json.loads((tmp_path / "config.json").read_text())
    whole = models.build(raw, options(dtype)).weights()
    entries = {name: tuple(target.shape) for name, target in whole.items()}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        whole[name].tensor.copy_(values)
    for rank in range(2):
        model = models.build(raw, replace_fields(options(dtype), shard=Shard(rank, 2)))
        targets = model.weights()
        num_bytes.clear()
        monkeypatch.setattr(model, "finish_loading", lambda: None)
        weights.load(model, tmp_path, load_format="auto", seed=0, report=lambda *_: None)
        for name, target in targets.items():
            assert target.shape == entries[name]
            assert torch.equal(target.tensor, whole[name].tensor[target.index])
        assert sum(num_bytes) == sum(target.tensor.numel() * 4 for target in targets.values())
        divided = [target for target in targets.values() if target.source is not None]
        assert len(divided) == 2 * 7 + 2
