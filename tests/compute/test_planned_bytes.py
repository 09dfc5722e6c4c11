"""Planned bytes of quantized layers, compared with the tensors that stay in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aioengine.families._block_config import LinearShape, TensorSpecs
from aioengine.families._experts import ExpertsConfig
from aioengine.families._tensors import expert_tensors
from aioengine.kernels.triton import launcher
from aioengine.layers.experts import SparseMLP
from aioengine.layers.layer import Layer, Placement, Target
from aioengine.layers.linear import Linear
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.model_files.gguf_quantization import KEPT, StoredTypes
from aioengine.model_files.online_quantization import Method, OnlineQuantization
from aioengine.model_files.quantization import read_quantization
from aioengine.quantization._base import LinearFormat
from aioengine.quantization.gguf import gguf_formats
from aioengine.quantization.online import online_formats
from aioengine.quantization.stored import formats
from aioengine.runner.weights import fill_dummy
from aioengine.settings.memory_model import inbox_bytes
from tests.compute.models.test_gguf import random_blocks
from tests.compute.quantized import METHODS

CPU = torch.device("cpu")
SHAPE = LinearShape("mlp.up_proj", 256, 512, has_bias=False)
ONLINE: list[tuple[Method, int]] = [("fp8", 128), ("int8", 128), ("int4", 128), ("int4", 32)]
Memory = Callable[..., TensorSpecs]
Fill = Callable[[dict[str, Target]], None]


def memory() -> dict[int, int]:
    """Return address -> bytes of the storages of all tensors."""
    gc.collect()
    sizes: dict[int, int] = {}
    for tensor in (value for value in gc.get_objects() if isinstance(value, Tensor)):
        if tensor.is_mkldnn:
            sizes[id(tensor)] = tensor.numel() * tensor.itemsize
        elif tensor.device.type == "cpu":
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sizes


def test_inbox_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from aioengine.kernels.triton.rank_sums import Inboxes

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    inboxes = Inboxes(0, 2, 100, 96, CPU)
    assert inboxes.memory.num_bytes == inbox_bytes(2, 2, max_rows=100, num_columns=96)


def prepare_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the tensors of a CPU for the kernels of a GPU."""
    if device != "cpu":
        pytest.importorskip("triton")
    monkeypatch.setattr(launcher, "supports", lambda x: device != "cpu")


def bytes_of(make: Callable[[Placement], Layer], format_of: LinearFormat, fill: Fill) -> int:
    """Return the bytes of the tensors of a layer after loading."""
    before = memory()
    layer = make(Placement(dtype=torch.bfloat16, device=CPU, format_of=lambda name: format_of))
    fill(layer.weights())
    layer.finish_loading()
    return sum(num_bytes for address, num_bytes in memory().items() if address not in before)


def fill_stored(targets: dict[str, Target], prefix: str, stored: dict[str, Tensor]) -> None:
    """Load the tensors of a layer. A text may be shorter than its target."""
    for name, target in targets.items():
        if name.startswith(prefix):
            tensor = stored[name.removeprefix(prefix)].flatten()
            target.tensor.copy_(functional.pad(tensor, (0, target.tensor.numel() - len(tensor))).view_as(target.tensor))


def check(format_of: LinearFormat, fill: Fill, in_memory: Memory, *, is_on_cpu: bool) -> None:
    real = bytes_of(lambda placement: Linear(SHAPE.inputs, {"up_proj": SHAPE.outputs}, placement), format_of, fill)
    planned = sum(spec.num_bytes(2) for spec in in_memory(SHAPE, is_on_cpu=is_on_cpu).values())
    assert planned == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", METHODS)
def test_layers_of_checkpoints(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "w8a8" and device != "cpu":
        pytest.skip("its product for a GPU does not take tensors of a CPU")
    prepare_for(device, monkeypatch)
    quantization = read_quantization(METHODS[name].config)

    def fill(targets: dict[str, Target]) -> None:
        fill_stored(targets, "up_proj.", METHODS[name].quantize(torch.randn(SHAPE.outputs, SHAPE.inputs)).tensors)

    format_of = formats(quantization)(SHAPE.name)
    check(format_of, fill, quantization.tensors_in_memory, is_on_cpu=device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("method", "group"), ONLINE)
def test_layers_that_are_quantized_while_loading(
    method: Method, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_for(device, monkeypatch)
    quantization = OnlineQuantization(method=method, group_size=group)
    format_of = online_formats(quantization)[0](SHAPE.name)
    check(format_of, partial(fill_dummy, seed=0), quantization.tensors_in_memory, is_on_cpu=device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", KEPT)
def test_layers_of_gguf_files(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_for(device, monkeypatch)
    stored = StoredTypes({SHAPE.name: kind})

    def fill(targets: dict[str, Target]) -> None:
        row = torch.frombuffer(random_blocks(kind, SHAPE.inputs // BLOCKS[kind][0]), dtype=torch.uint8)
        for target in targets.values():
            target.write(row.expand(SHAPE.outputs, -1))

    format_of = gguf_formats(stored)[0](SHAPE.name)
    check(format_of, fill, stored.tensors_in_memory, is_on_cpu=device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["awq", "gptq", "packed-zeros", "nf4-double", "fp8", "fp8-blocks"])
def test_experts_of_checkpoints(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_for(device, monkeypatch)
    quantization = read_quantization(METHODS[name].config)
    config = ExpertsConfig(num_experts=2, top_k=1, inner_size=256)

    def fill(targets: dict[str, Target]) -> None:
        fill_dummy({"gate": targets.pop("gate.weight")}, seed=0)
        layers = {target_name.split("_proj.")[0] for target_name in targets}
        for layer in layers:
            shape = (512, 256) if "down" in layer else (256, 512)
            fill_stored(targets, f"{layer}_proj.", METHODS[name].quantize(torch.randn(shape)).tensors)

    format_of = formats(quantization)("experts.0.up_proj")
    real = bytes_of(lambda placement: SparseMLP(512, config, placement), format_of, fill)
    in_memory = partial(quantization.tensors_in_memory, is_on_cpu=device == "cpu")
    planned = sum(spec.num_bytes(2) for spec in expert_tensors(config, 512, "", in_memory).values())
    assert planned == pytest.approx(real, rel=0.02)
