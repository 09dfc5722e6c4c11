"""Errors if GPU memory is short, with a simulated GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from msgspec.structs import replace

from aioengine.attention._base import AttentionShape
from aioengine.models._base import InputSpec
from aioengine.runner import build, device_memory
from aioengine.runner.device_memory import DeviceMemory, captured_bytes
from tests.compute.rank_threads import rank_threads
from tests.compute.runner_world import make_settings, save_model

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.models._base import Model

GIB = 1 << 30
GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a GPU of 80 GiB with 2 GiB free. The last number of the list is the memory of this process."""
    held = [0]
    for name, value in {
        "memory_reserved": lambda _: held[-1],
        "synchronize": lambda _: None,
        "mem_get_info": lambda _: (2 * GIB, 80 * GIB),
        "get_device_name": lambda _: "NVIDIA H100",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return held


def test_error_has_needed_and_available_memory_and_advice(reserved: list[int]) -> None:
    memory = DeviceMemory(GPU)
    with memory.record("the weights", advice=""):
        reserved.append(5 * GIB)
    recording = memory.record("a pool", advice="Less.", need=lambda: GIB)
    with pytest.raises(ValueError, match="not enough GPU memory") as caught, recording:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has ...")
    assert str(caught.value) == (
        "not enough GPU memory for a pool (1.0 GiB): CUDA out of memory. NVIDIA H100 has 80.0 GiB, 2.0 GiB free; used: "
        "the weights 5.0 GiB, other processes and CUDA 73.0 GiB. Less."
    )
    assert caught.value.__cause__ is None


def test_out_of_memory_of_cuda_itself_is_reported(reserved: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    recording = DeviceMemory(GPU).record("the weights", advice="")
    with pytest.raises(ValueError, match="CUDA itself is out of memory"), recording:
        fail(0)


def test_other_errors_are_passed_on(reserved: list[int]) -> None:
    with pytest.raises(RuntimeError, match="^CUDA error: illegal"), DeviceMemory(GPU).record("x", advice=""):
        raise RuntimeError("CUDA error: illegal memory access")


def test_memory_of_a_cpu_is_not_recorded() -> None:
    memory = DeviceMemory(CPU)
    with memory.record("the weights", advice=""):
        pass
    assert memory.recorded == {}
    assert memory.facts()["device_name"] == "cpu"


def test_a_model_larger_than_the_memory_of_a_cpu_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen2", tmp_path)
    monkeypatch.setattr(device_memory, "free_host_memory", lambda: 2048)
    monkeypatch.setattr(build._ModelSource, "load", pytest.fail)
    message = r"not enough memory: the weights need .* KiB, but only 2\.0 KiB are free\. .*quantization='int4'"
    with pytest.raises(ValueError, match=message):
        build.build(make_settings(tmp_path), lambda _: None)


def test_all_ranks_refuse_weights_if_one_of_them_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "free_host_memory", lambda: 8 * GIB)

    def error_of(rank: int, needs: list[int]) -> str:
        model = cast("Model", SimpleNamespace(weights=lambda: {"weight": SimpleNamespace(num_bytes=needs[rank])}))
        try:
            DeviceMemory(CPU, threads.shards[rank].group).check_free(model, advice="Less.")
        except ValueError as error:
            return str(error)
        return ""

    with rank_threads(2) as threads:
        assert threads.call(lambda rank: error_of(rank, [4 * GIB, 4 * GIB])) == ["", ""]
        errors = threads.call(lambda rank: error_of(rank, [GIB, 5 * GIB]))
    shown = "not enough memory: the weights need 5.0 GiB, but only 4.0 GiB are free for each rank. Less."
    assert errors[1] == shown
    assert errors[0]


def test_advice_names_arguments_of_the_engine() -> None:
    from aioengine.api import args

    for text in (build._POOL_ADVICE, build._GRAPHS_ADVICE):
        assert set(re.findall(r"[a-z]+_[a-z_]+", text)) <= args.ARGUMENTS.keys()


def test_bytes_of_captured_prompt_steps() -> None:
    shape = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
    model = cast("Model", SimpleNamespace(attention_shape=shape, dtype=torch.bfloat16, input_spec=InputSpec()))
    assert captured_bytes(model, 0) == 0
    # q, k and v, and the attention output
    assert captured_bytes(model, 1024) == 1024 * (4 + 2 + 2 + 4) * 8 * 2


def test_pool_budget_keeps_memory_for_steps_and_graphs(reserved: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(device_memory, "peak_memory", lambda *_: GIB)
    shape = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
    facts = {
        "attention_shape": shape,
        "dtype": torch.bfloat16,
        "input_spec": InputSpec(),
        "vocab_size": 1 << 18,
        "num_active": 1,
    }
    model, settings = cast("Model", SimpleNamespace(**facts)), make_settings("", num_pages=None)
    settings = replace(
        settings,
        scheduler=replace(settings.scheduler, max_running=1024),
        memory=replace(settings.memory, mem_fraction_static=0.9),
    )
    kept = GIB + GIB // 4 + 2 * 4 * 1024 * (1 << 18) + 2 * GIB  # step with margin, token counts, graphs
    budget = DeviceMemory(GPU).pool_budget(model, settings, None)
    assert budget.num_bytes == pytest.approx(62 * GIB - kept, abs=1)
    words = "mem_fraction_static=0.9 leaves 62.0 GiB; the largest step and the CUDA graphs need 5.2 GiB of it"
    assert words in budget.explanation
    settings = replace(settings, memory=replace(settings.memory, num_pages=7))
    requested = DeviceMemory(GPU).pool_budget(model, settings, None)
    assert requested.num_bytes == 70 * GIB - kept
    assert "mem_fraction_static" not in requested.explanation
