"""The choice of the attention backend, and its warnings and errors, if FlashInfer does not work."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest
import torch

from aioengine.attention import fused
from aioengine.attention._base import AttentionShape, BackendUnavailableError
from aioengine.runner.build import AttentionChoice, choose_attention
from aioengine.settings import resolve
from aioengine.settings.config import RunnerSettings

SHAPE = AttentionShape(num_layers=1, num_heads=2, num_kv_heads=1, head_size=64, scale=0.125)
EXPLICIT = RunnerSettings(factory="", device="cpu", attention_backend="flashinfer", num_threads=1)
AUTOMATIC = msgspec.structs.replace(EXPLICIT, fallback_backend="triton")
KERNELS = "aioengine.attention._flashinfer_ready"


def choose(settings: RunnerSettings) -> AttentionChoice:
    return choose_typed(settings, kv_dtype=torch.bfloat16)


def choose_typed(settings: RunnerSettings, *, kv_dtype: torch.dtype) -> AttentionChoice:
    device = torch.device("cpu")
    return choose_attention(settings, SHAPE, torch.bfloat16, device, kv_dtype=kv_dtype, report=lambda _: None)


def replace_kernels(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[float]:
    """Replace FlashInfer's kernels: ``make_ready`` raises ``error``. Returns the list of its timeouts."""
    timeouts: list[float] = []

    def make_ready(*_: object, timeout_s: float, **options: object) -> None:
        timeouts.append(timeout_s)
        if error is not None:
            raise error

    monkeypatch.setitem(sys.modules, KERNELS, SimpleNamespace(make_ready=make_ready))  # type: ignore[arg-type]
    return timeouts


def test_flashinfer_is_chosen_if_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = replace_kernels(monkeypatch, None)
    assert choose(msgspec.structs.replace(AUTOMATIC, compile_timeout_s=77.0)) == AttentionChoice("flashinfer")
    assert timeouts == [77.0]


def test_fallback_is_chosen_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch, BackendUnavailableError("nvcc cannot be found"))
    choice = choose(AUTOMATIC)
    assert (choice.name, choice.warning) == (
        "triton",
        "attention uses triton, which is slower than FlashInfer, because nvcc cannot be found",
    )
    with pytest.raises(ValueError, match="attention_backend='flashinfer' does not work here: nvcc cannot be found"):
        choose(EXPLICIT)


def test_timeout_is_an_error_despite_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(monkeypatch, TimeoutError("too slow"))
    with pytest.raises(TimeoutError):
        choose(AUTOMATIC)


def import_kernels(monkeypatch: pytest.MonkeyPatch, build: Callable[..., object]) -> ModuleType:
    """Import the module that compiles FlashInfer's kernels without FlashInfer. build: of the backend."""
    package = MagicMock()
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention", "flashinfer.prefill", "flashinfer.utils"):
        monkeypatch.setitem(sys.modules, name, package)
    backend = SimpleNamespace(build=build)
    monkeypatch.setitem(sys.modules, "aioengine.attention.flashinfer", backend)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    kernels = importlib.import_module(KERNELS)
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    return kernels


def test_out_of_memory_does_not_select_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own error differs from torch's."""

    def fail(*_: object) -> None:
        raise RuntimeError(message)

    kernels = import_kernels(monkeypatch, fail)
    monkeypatch.setattr(kernels, "variants", lambda *_: [])
    message = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match=message):
        choose(AUTOMATIC)
    message = "CUDA error: invalid device function"
    assert "FlashInfer's kernels cannot be used: RuntimeError: CUDA error: invalid" in choose(AUTOMATIC).warning


def test_start_does_not_wait_for_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with attention_backend="flashinfer" does."""
    kernels = import_kernels(monkeypatch, MagicMock())
    can_end, source = threading.Event(), SimpleNamespace(name="", is_aot=False, is_compiled=False)
    compilation = SimpleNamespace(compile_missing=lambda _: can_end.wait(10))
    monkeypatch.setattr(kernels, "variants", lambda *_: [()])
    monkeypatch.setattr(kernels, "gen_batch_prefill_module", lambda: source)
    monkeypatch.setattr(kernels, "Compilation", lambda *_: compilation)
    monkeypatch.setattr(kernels, "check_tools", lambda _: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    assert choose(AUTOMATIC) == AttentionChoice("flashinfer")
    assert not kernels.kernels_ready.is_set()
    can_end.set()
    assert kernels.kernels_ready.wait(10)
    can_end.clear()
    threading.Timer(0.1, can_end.set).start()
    assert choose(EXPLICIT) == AttentionChoice("flashinfer")
    assert can_end.is_set()


def test_missing_package_selects_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    assert "pip install 'aioengine[cuda]' installs FlashInfer" in choose(AUTOMATIC).warning


def test_import_error_selects_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.import_module

    def fail(name: str) -> ModuleType:
        if name == KERNELS:
            raise RuntimeError("flashinfer-cubin version (1) does not match flashinfer version (2)")
        return plain(name)

    monkeypatch.setattr("importlib.import_module", fail)
    assert "FlashInfer cannot be imported: RuntimeError: flashinfer-cubin version" in choose(AUTOMATIC).warning


def test_torch_replaces_fused_if_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = msgspec.structs.replace(EXPLICIT, attention_backend="fused")
    monkeypatch.setattr("aioengine.attention.fused.supports", lambda *_: True)
    assert choose(fused) == AttentionChoice("fused")
    monkeypatch.setattr("aioengine.attention.fused.supports", lambda *_: False)
    assert choose(fused) == AttentionChoice("torch")


def test_kv_dtype_that_differs_from_the_model_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.attention.fused.supports", lambda *_: True)
    for name in ("fused", "torch"):
        settings = msgspec.structs.replace(EXPLICIT, attention_backend=name)
        assert choose_typed(settings, kv_dtype=torch.float32) == AttentionChoice("torch")
    settings = msgspec.structs.replace(EXPLICIT, attention_backend="fused")
    assert choose_typed(settings, kv_dtype=torch.int8) == AttentionChoice("fused")
    replace_kernels(monkeypatch, None)
    for name in ("flashinfer", "triton"):
        settings = msgspec.structs.replace(AUTOMATIC, attention_backend=name)
        assert choose_typed(settings, kv_dtype=torch.float8_e4m3fn) == AttentionChoice(name)
    replace_kernels(monkeypatch, BackendUnavailableError("nvcc cannot be found"))
    assert choose_typed(AUTOMATIC, kv_dtype=torch.float8_e4m3fn).name == "triton"


def test_fused_chunk_constants_agree() -> None:
    assert resolve.FUSED_CHUNK == fused.CHUNK


def test_torch_replaces_fused_for_latent_attention() -> None:
    settings = msgspec.structs.replace(EXPLICIT, attention_backend="fused")
    latent, dtype, device = replace(SHAPE, value_size=48), torch.bfloat16, torch.device("cpu")
    choice = choose_attention(settings, latent, dtype, device, kv_dtype=dtype, report=lambda _: None)
    assert choice == AttentionChoice("torch")
