"""Compile and load the FlashInfer kernels that ``attention.flashinfer`` uses, at the start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from flashinfer.jit.attention import gen_batch_prefill_module
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import determine_attention_backend

from aioengine.attention import flashinfer
from aioengine.attention._base import AttentionShape, BackendUnavailableError, kv_pool_shape
from aioengine.attention._compilation import Compilation, CompilationTimeoutError, check_tools, is_ready, kernels_ready
from aioengine.kernels.triton.launcher import compile_only
from aioengine.protocol.messages import Progress

if TYPE_CHECKING:
    from flashinfer.jit import JitSpec

logger = logging.getLogger(__name__)

HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
_NO_ROTATION = 0


def variants(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[tuple[object, ...]]:
    """Return FlashInfer's parameters of the prefill kernels of the layers: for a window, for no window, or both."""
    types = (dtype, dtype, dtype, torch.int32)  # queries, keys and values, outputs, indices
    sizes = (shape.head_size, shape.head_size, _NO_ROTATION)
    is_capped = shape.soft_cap is not None
    name = determine_attention_backend(device, _NO_ROTATION, False, False, dtype, dtype)
    return [
        (name, *types, *sizes, is_windowed, is_capped, False)
        for is_windowed in sorted({window is not None for window in shape.windows or (None,)})
    ]


def make_ready(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype,
    timeout_s: float,
    waits: bool,
    report: Callable[[Progress], None],
) -> None:
    """Compile missing kernels, load all kernels, and run them once with a pool of one page.

    waits: False: missing kernels are compiled and loaded in the background (see ``kernels_ready``).

    Raises:
        BackendUnavailableError: FlashInfer has no kernels for this dtype and head size, or they do not compile, load
            or run on this machine.
        CompilationTimeoutError: they did not compile in time.
        RuntimeError: the GPU is out of memory.
    """
    if dtype not in DTYPES or shape.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise BackendUnavailableError(
            f"FlashInfer has no kernels for head size {shape.head_size} in {str(dtype).removeprefix('torch.')}; it "
            f"supports {sizes} in bfloat16 and float16"
        )
    try:
        chosen = variants(shape, dtype, device)
        specs = [gen_batch_prefill_module(*parameters) for parameters in chosen]
        logger.info("FlashInfer's kernels: %s", ", ".join(f"{spec.name} ({_state(spec)})" for spec in specs))
        if waits or all(map(is_ready, specs)):
            Compilation(time.monotonic() + timeout_s, report).compile_missing(specs)
        else:
            check_tools(specs)
            kernels_ready.clear()
            threading.Thread(target=_compile_in_background, args=(chosen, specs, timeout_s), daemon=True).start()
        for layers in shape.groups:
            part = shape.part(layers)
            pool = torch.zeros(kv_pool_shape(part, num_pages=1, page_size=16), dtype=kv_dtype, device=device)
            with compile_only():  # affects our Triton kernels only: FlashInfer's kernels run
                flashinfer.build(part, pool).warm_up()
        torch.cuda.synchronize(device)
    except (BackendUnavailableError, CompilationTimeoutError):
        raise
    except (OSError, RuntimeError, ImportError, AttributeError) as error:
        if "out of memory" in str(error):  # torch's or CUDA's: the kernels are not the cause
            raise
        message = f"FlashInfer's kernels cannot be used: {type(error).__name__}: {error}"
        raise BackendUnavailableError(message) from error


def _compile_in_background(chosen: list[tuple[object, ...]], specs: list[JitSpec], timeout_s: float) -> None:
    """Compile and load the kernels. If this fails, prompts keep using our Triton kernels."""
    try:
        Compilation(time.monotonic() + timeout_s, lambda _: None).compile_missing(specs)
        for parameters in chosen:
            get_batch_prefill_module(*parameters)
    except (BackendUnavailableError, CompilationTimeoutError, OSError, RuntimeError) as error:
        logger.warning("prompts use Triton kernels, which are slower than FlashInfer's, because %s", error)
        return
    kernels_ready.set()
    logger.info("FlashInfer's kernels are compiled: prompts use them from now on")


def _state(spec: JitSpec) -> str:
    if spec.is_aot:
        return "precompiled"
    return "compiled" if spec.is_compiled else "not compiled"
