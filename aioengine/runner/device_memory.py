"""Device memory: usage by purpose, the size of the KV pool, and the errors if memory is short.

The memory of a step, in addition to weights and pool, is measured, so that steps never run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aioengine.api import checks
from aioengine.attention._base import AttentionShape
from aioengine.kernels.kv_target import WriteKV
from aioengine.kernels.triton.launcher import compile_only
from aioengine.layers.ranks import RankGroup
from aioengine.models._base import Model, VisionModel
from aioengine.protocol.messages import Fact
from aioengine.runner.graphs.ladder import longest_graph
from aioengine.runner.inputs import model_inputs
from aioengine.runner.lora.grouping import StepAdapters
from aioengine.runner.lora.pool import AdapterPool
from aioengine.settings.config import SchedulerSettings, Settings
from aioengine.settings.machine import free_host_memory
from aioengine.settings.memory_model import (
    GPU_FEATURE_BYTES,
    SAMPLED_ROWS,
    KVCache,
    PoolDemand,
    PoolFit,
    format_bytes,
    reserved_bytes,
    with_margin,
)

MAX_IMAGE_TOKENS = 16_384
"""Tokens of the largest image for which memory is reserved: the limit in Qwen's model files."""

_WARMUP_ROWS = 1, 2, 17, 33, 65
"""Row counts run before a measurement: one for each range of row counts with a separate matmul kernel."""

_WARMUP_IMAGES = 1, 4
"""Tokens of images run before a measurement: kernels have specializations for multiples of 16 patches."""


class DeviceMemory:
    """Records the memory of one device that this process has allocated, by purpose. On a CPU, it records nothing."""

    def __init__(self, device: torch.device, ranks: RankGroup | None = None) -> None:
        self.device = device
        self.recorded: dict[str, int] = {}
        self._ranks = ranks

    @contextmanager
    def record(self, purpose: str, *, advice: str, need: Callable[[], int] | None = None) -> Iterator[None]:
        """Record, under ``purpose``, the memory that the body allocates. need: returns its bytes, for the message.

        Raises:
            ValueError: not enough memory. The message has the free memory, the memory of this engine and of other
                processes, and ``advice``.
        """
        if self.device.type == "cpu":
            yield
            return
        before = torch.cuda.memory_reserved(self.device)
        try:
            yield
        except RuntimeError as error:  # not an OutOfMemoryError if CUDA itself is out of memory
            if "out of memory" not in str(error):
                raise
            needed = "" if need is None else f" ({format_bytes(need())})"
            cause = str(error).split(". ")[0]
            message = f"not enough GPU memory for {purpose}{needed}: {cause}. {self.describe()}. {advice}"
            raise ValueError(message) from None
        torch.cuda.synchronize(self.device)
        self.recorded[purpose] = torch.cuda.memory_reserved(self.device) - before

    def check_free(self, model: Model, *, advice: str) -> None:
        """Check that the weights of ``model`` fit the free memory of a CPU, before they are loaded.

        A CPU's memory is used when it is written, and the system ends processes if there is none. All ranks call this.

        Raises:
            ValueError: a rank needs more than its share. All ranks raise it.
        """
        if self.device.type != "cpu":
            return
        needed = sum(target.num_bytes for target in model.weights().values())
        num_ranks = 1 if self._ranks is None else self._ranks.size
        free = free_host_memory() // num_ranks
        left = free - needed
        if self._ranks is not None:  # this also waits for all ranks, so none has used the memory yet
            left = self._ranks.all_reduce_min(left)
        if left < 0:
            needs = f"the weights need {format_bytes(needed)}, but only {format_bytes(free)} are free"
            raise ValueError(f"not enough memory: {needs}{' for each rank' * (num_ranks > 1)}. {advice}")

    def pool_budget(
        self, model: Model, settings: Settings, adapters: AdapterPool | None, draft: Model | None = None
    ) -> PoolBudget:
        """Return the memory for the KV pool and states, after the weights and the adapter slots are allocated.
        draft: the draft model, which computes its part of a step after the model.

        If the size of the pool was requested, it is all free memory, else the part that ``mem_fraction_static`` allows.
        """
        limits = settings.scheduler
        fraction = settings.memory.mem_fraction_static if settings.memory.num_pages is None else None
        limit = "" if fraction is None else f"mem_fraction_static={fraction:g}"
        if self.device.type == "cpu":
            free = free_host_memory() // settings.runner.num_runners
            explanation = f"{format_bytes(free)} are free" + (f", and {limit} of it may be used" if limit else "")
            return PoolBudget(int(free * (1.0 if fraction is None else fraction)), explanation)
        advice = "Lower chunked_prefill_size or max_running_requests"
        with self.record("a step of the largest size", advice=advice):
            peak = peak_memory(model, self.device, limits, adapters)
            if draft is not None:
                peak = max(peak, peak_memory(draft, self.device, limits, None))
        steps = with_margin(peak)
        reserved = reserved_bytes(peak, max_running=limits.max_running, vocab_size=model.vocab_size)
        num_captured = longest_graph(settings, model.num_active)
        reserved += captured_bytes(model, num_captured) + steps * num_captured // limits.max_step_tokens
        if isinstance(model, VisionModel):  # the vision tower runs before the step, in the same memory
            with self.record("the largest image", advice="Lower context_length, which limits the images of a prompt"):
                image_tokens = min(settings.model.context_length, MAX_IMAGE_TOKENS)
                peak, feature_bytes = image_memory(model, self.device, image_tokens)
            reserved += max(with_margin(peak) - steps, 0) + feature_bytes + GPU_FEATURE_BYTES
        left, total = torch.cuda.mem_get_info(self.device)
        explanation = self.describe()
        if fraction is not None:
            left = int(left - (1.0 - fraction) * total)
            explanation += f". {limit} leaves {format_bytes(max(left, 0))}"
        explanation += f"; the largest step and the CUDA graphs need {format_bytes(reserved)} of it"
        return PoolBudget(max(left - reserved, 0), explanation)

    def describe(self) -> str:
        """Describe total and free memory, and the memory of this engine and of other processes."""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return "CUDA itself is out of memory"
        used = {**self.recorded, "other processes and CUDA": total - free - torch.cuda.memory_reserved(self.device)}
        parts = [f"{purpose} {format_bytes(size)}" for purpose, size in used.items() if size > 0]
        name = torch.cuda.get_device_name(self.device)
        return f"{name} has {format_bytes(total)}, {format_bytes(free)} free; used: {', '.join(parts)}"

    def facts(self) -> dict[str, Fact]:
        """Return the device and its memory after the runner is built."""
        if self.device.type == "cpu":
            return {"device_name": "cpu", "free_bytes": free_host_memory()}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "device_name": torch.cuda.get_device_name(self.device),
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid),
            "graphs_bytes": self.recorded.get("CUDA graphs", 0),
            "free_bytes": free,
            "total_bytes": total,
        }


class NoAttention:
    """Replaces attention while memory is measured: returns a copy of the queries in the size of the output."""

    def __init__(self, shape: AttentionShape) -> None:
        self._output_size = shape.output_size

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E] -> [T, H * V]."""
        return functional.pad(q, (0, self._output_size - q.shape[2])).flatten(1)


def captured_bytes(model: Model, num_tokens: int) -> int:
    """Return the bytes of the buffers that all graphs of steps with prompts share: q, k, v, attention output and input
    embeddings of ``num_tokens`` tokens. ``pool_budget`` adds the intermediate tensors, which they share too.
    """
    shape = model.attention_shape
    token_size = shape.num_input_heads * shape.query_size
    token_size += shape.num_heads * shape.output_size + (model.hidden_size if model.input_spec.embeddings else 0)
    return num_tokens * token_size * model.dtype.itemsize


@torch.inference_mode()
def peak_memory(model: Model, device: torch.device, limits: SchedulerSettings, adapters: AdapterPool | None) -> int:
    """Measure the bytes of the largest step, in addition to weights and pool: with the fp32 logits of ``SAMPLED_ROWS``
    rows, without the token counts of penalties.

    Raises:
        torch.OutOfMemoryError: the step does not fit.
    """
    attention = NoAttention(model.attention_shape)
    # Compile Triton kernels and run torch's operations once: both allocate memory that is not part of a step.
    short = model.shortened()
    with compile_only():
        for num_rows in _WARMUP_ROWS:
            ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
            short.compute_logits(short.forward(model_inputs(short, ids, ids), attention))
    rows: StepAdapters | None = None
    if adapters is not None:
        rows = StepAdapters(np.ones(limits.max_step_tokens, dtype=np.int32), None, adapters.group)
    ids = torch.zeros(limits.max_step_tokens, dtype=torch.int64, device=device)

    def run() -> None:
        hidden = model.forward(model_inputs(model, ids, ids, adapters=rows), attention)
        logits = model.compute_logits(hidden[: max(limits.max_running, SAMPLED_ROWS)])
        logits[:SAMPLED_ROWS].to(torch.float32, copy=True)

    return ids.nbytes + _peak_of(device, run)


def _peak_of(device: torch.device, run: Callable[[], None]) -> int:
    """Return the maximum bytes that ``run`` allocates at the same time."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def image_memory(model: VisionModel, device: torch.device, num_tokens: int) -> tuple[int, int]:
    """Measure the bytes that the largest image of up to ``num_tokens`` tokens needs while its features are computed.
    Return them and the bytes of the features, which are included.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    for small in _WARMUP_IMAGES:
        model.encode_image(model.largest_image(small))
    arrays = model.largest_image(num_tokens)
    feature_bytes = 0

    def run() -> None:
        nonlocal feature_bytes
        # copied here, because the model would copy through pinned memory that is never freed
        feature_bytes = model.encode_image({name: array.to(device) for name, array in arrays.items()}).nbytes

    return _peak_of(device, run), feature_bytes


class PoolBudget(NamedTuple):
    """Memory for the pool. ``explanation``: how it was computed, for error messages."""

    num_bytes: int
    explanation: str


def kv_cache_of(shape: AttentionShape) -> KVCache:
    """Return the sizes of the KV cache of a model."""
    return KVCache(
        num_layers=shape.num_kv_layers,
        layer_elements=shape.num_sides * shape.num_kv_heads * shape.head_size,
        head_size=shape.head_size,
        windows=shape.windows if shape.is_causal else (),
    )


def fit_pool(demand: PoolDemand, budget: PoolBudget) -> PoolFit:
    """Divide the memory of the pool.

    Raises ValueError if the states of one request, the requested pages, or one request of the context length do not
    fit.
    """
    pool, state_bytes, explanation = demand.fit(budget.num_bytes), demand.state_bytes, budget.explanation
    if not pool.num_rows:
        raise ValueError(
            f"the states of one request of this model need {format_bytes(state_bytes)}, and padding rows as much "
            f"again, but only {format_bytes(max(demand.state_limit(budget.num_bytes), 0))} are available; "
            f"{explanation}. Lower max_total_tokens, raise mem_fraction_static, or free memory"
        )
    if state_bytes:
        requests, states = checks.counted(pool.num_rows, "request"), format_bytes((pool.num_rows + 1) * state_bytes)
        snapshots = format_bytes(pool.num_snapshots * state_bytes)
        explanation += f"; the states of {requests} need {states}, and their {pool.num_snapshots} snapshots {snapshots}"
    if demand.num_tokens is not None and not pool.num_pages:
        raise ValueError(
            f"a KV pool of {demand.num_tokens} tokens needs "
            f"{format_bytes(demand.pages_in(demand.num_tokens) * demand.page_bytes)}, but only "
            f"{format_bytes(max(pool.left, 0))} are available; {explanation}. Lower max_total_tokens"
        )
    context_pages = demand.pages_in(demand.context_length)
    if demand.num_tokens is None and pool.num_pages < context_pages:
        raise ValueError(
            f"the KV pool has a capacity of {demand.tokens_in(pool.num_pages)} tokens, but one request may have "
            f"{demand.context_length} (context_length), which need {format_bytes(context_pages * demand.page_bytes)}; "
            f"{explanation}. Lower context_length, raise mem_fraction_static, or free memory"
        )
    return pool
