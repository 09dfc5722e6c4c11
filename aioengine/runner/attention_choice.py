"""Which attention backend computes: that of the settings, or, where it does not work here, the one to fall back on.

This is found out, kernels compiled and run once, before the weights are loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from aioengine import attention
from aioengine.attention import fused
from aioengine.attention._base import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from aioengine.attention._base import AttentionBackend, AttentionShape
    from aioengine.config import RunnerSettings
    from aioengine.protocol.messages import Progress


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """``name``: of the backend. ``warning``: why it is not the one of the settings; empty where it is."""

    name: str
    warning: str = ""

    def build(self, shape: AttentionShape, kv_pool: Tensor) -> AttentionBackend:
        module = importlib.import_module(f"{attention.__name__}.{self.name}")
        return cast("AttentionBackend", module.PLUGIN(shape, kv_pool))


def choose_attention(
    settings: RunnerSettings,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype,
    report: Callable[[Progress], None],
) -> AttentionChoice:
    """The backend that works here for queries of ``dtype`` and keys and values of ``kv_dtype``.

    Raises:
        ValueError: there is none of this name, or it does not work and there is none to fall back on.
        CompilationTimeoutError: its kernels did not compile in time.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(attention.__path__) if module.name[0] != "_")
    name = settings.attention_backend
    if name not in known:
        message = f"attention_backend {name!r} is not known; what works: {', '.join(known)}"
        raise ValueError(message)
    if name == "fused" and (kv_dtype != dtype or not fused.serves(shape.head_size, dtype, device)):
        return AttentionChoice("torch")
    if kv_dtype != dtype and name != "torch":
        message = (
            f"attention_backend {name!r} needs keys and values of the type of the queries, {dtype}, not {kv_dtype}; "
            "'torch' works"
        )
        raise ValueError(message)
    if name != "flashinfer":
        return AttentionChoice(name)
    try:
        make_flashinfer_ready(settings, shape, dtype, device, report=report)
    except BackendUnavailableError as error:
        if not settings.fallback_backend:
            message = f"attention_backend='flashinfer' does not work here: {error}"
            raise ValueError(message) from error
        warning = (
            f"attention runs in {settings.fallback_backend}'s kernels, which are slower than FlashInfer's: {error}"
        )
        return AttentionChoice(settings.fallback_backend, warning)
    return AttentionChoice(name)


def make_flashinfer_ready(
    settings: RunnerSettings,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    report: Callable[[Progress], None],
) -> None:
    """Import the package, compile its kernels and try them.

    Raises:
        BackendUnavailableError: one of these does not work.
    """
    try:
        kernels = importlib.import_module(f"{attention.__name__}._flashinfer_ready")
    except ModuleNotFoundError as error:
        message = f"the package {error.name!r} is not installed; pip install 'aioengine[cuda]' brings FlashInfer"
        raise BackendUnavailableError(message) from error
    except (ImportError, OSError, RuntimeError) as error:
        message = f"FlashInfer cannot be imported: {type(error).__name__}: {error}"
        raise BackendUnavailableError(message) from error
    kernels.make_ready(shape, dtype, device, timeout_s=settings.compile_timeout_s, report=report)
