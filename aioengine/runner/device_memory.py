"""What the memory of the device is used for, how much the KV pool may take, and the errors where it is too little.

What a step needs beside weights and pool is measured, not guessed, so that running never runs out. The free memory of a
CPU is what the machine has available, and at most what is left of the limits of its control groups (version 1 and 2,
each ancestor); file pages that the kernel can drop count as free.
"""

from __future__ import annotations

import math
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from aioengine.api import checks
from aioengine.attention._base import kv_pool_shape
from aioengine.kernels.triton.launcher import compile_only
from aioengine.models._base import VisionModel
from aioengine.runner.images import GPU_FEATURE_BYTES
from aioengine.runner.inputs import model_inputs
from aioengine.settings.machine import free_host_memory
from aioengine.settings.memory_model import SNAPSHOTS_PER_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from aioengine.attention._base import AttentionShape, WriteKV
    from aioengine.layers.adapters import AdapterRows
    from aioengine.models._base import Model
    from aioengine.settings.page_groups import PageGroups

_MIB, _GIB = 1 << 20, 1 << 30

GRAPHS_BYTES = 2 << 30
"""Reserved for kernel workspaces and for the graphs of decode steps, whose shared pool is about one step large."""

SAMPLED_ROWS = 256
"""Rows that the sampler processes at once, with their logits in fp32: bounds its memory."""

MAX_IMAGE_TOKENS = 16_384
"""Of the largest image for which memory is reserved: the limit in the files of Qwen's models."""

_WARMUP_ROWS = 1, 2, 17, 33, 65
"""Row counts that are run before a measurement: one for each range of row counts with a matmul kernel of its own."""

_WARMUP_IMAGES = 1, 4
"""Tokens of images that are run before a measurement: kernels have forms of their own for multiples of 16 patches."""

_SMI_TIMEOUT_S = 10.0


class LargestStep(NamedTuple):
    """Upper limits of a step.

    Attributes:
        num_tokens: tokens of any step.
        num_rows: rows that sample in one step.
        num_captured: tokens of the largest step with prompts that has CUDA graphs; 0: no such step has any.
        image_tokens: tokens of the largest image in a prompt.
    """

    num_tokens: int
    num_rows: int
    num_captured: int
    image_tokens: int = MAX_IMAGE_TOKENS


class DeviceMemory:
    """Records how much memory of one device this process has allocated, by purpose; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.taken: dict[str, int] = {}

    @contextmanager
    def take(self, purpose: str, *, advice: str, need: int | None = None) -> Iterator[None]:
        """Record what the body allocates under ``purpose``. ``need``: its bytes, if known, for the message.

        Raises:
            ValueError: not enough memory. The message lists the free memory, what this engine and other processes
                hold, and ends with ``advice``.
        """
        if self.device.type == "cpu":
            yield
            return
        before = torch.cuda.memory_reserved(self.device)
        try:
            yield
        except RuntimeError as error:  # no OutOfMemoryError where nothing is left for CUDA itself
            if "out of memory" not in str(error):
                raise
            needed = "" if need is None else f" ({format_bytes(need)})"
            cause = str(error).split(". ")[0]
            message = f"the GPU has not enough memory for {purpose}{needed}: {cause}. {self.describe()}. {advice}"
            raise ValueError(message) from None
        torch.cuda.synchronize(self.device)
        self.taken[purpose] = torch.cuda.memory_reserved(self.device) - before

    def pool_budget(
        self, model: Model, largest: LargestStep, *, fraction: float, adapters: AdapterRows | None = None
    ) -> PoolBudget:
        """Memory for the KV pool once the weights are loaded. ``fraction``: the engine's share of all memory.

        ``adapters``: of a step of ``largest.num_tokens`` tokens that use one; None: there are no adapters.
        """
        if self.device.type == "cpu":
            free = free_memory(self.device)
            explanation = f"{format_bytes(free)} are free, of which mem_fraction_static={fraction:g} may be used"
            return PoolBudget(free, int(free * fraction), explanation)
        advice = "Lower chunked_prefill_size or max_running_requests"
        with self.take("a step of the largest size", advice=advice):
            peak = peak_memory(model, self.device, largest, adapters)
        steps = peak + peak // 4  # a margin: steps of mixed sizes fragment the allocator's memory
        images = self._images_budget(model, largest, steps) if isinstance(model, VisionModel) else 0
        counts = 4 * largest.num_rows * model.vocab_size  # the token counts of penalties
        # 2 * counts: while the table of counts grows, the old and the new one exist
        reserved = steps + images + 2 * counts + GRAPHS_BYTES + captured_bytes(model, largest, steps)
        free, total = torch.cuda.mem_get_info(self.device)
        left = int(free - (1.0 - fraction) * total)
        explanation = (
            f"{self.describe()}. mem_fraction_static={fraction:g} leaves {format_bytes(max(left, 0))}, of which the "
            f"largest step and the CUDA graphs need {format_bytes(reserved)}"
        )
        return PoolBudget(max(free - reserved, 0), max(left - reserved, 0), explanation)

    def _images_budget(self, model: VisionModel, largest: LargestStep, steps: int) -> int:
        """Memory for images beside that of ``steps``, which the vision tower uses before the step itself."""
        with self.take("the largest image", advice="Lower context_length, which bounds the images of a prompt"):
            peak, feature_bytes = image_memory(model, self.device, largest.image_tokens)
        return max(peak + peak // 4 - steps, 0) + feature_bytes + GPU_FEATURE_BYTES

    def describe(self) -> str:
        """How much there is, how much is free, and who has the rest, as far as it is known."""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
            name = torch.cuda.get_device_name(self.device)
            text = f"{name} has {format_bytes(total)}, of which {format_bytes(free)} are free"
        except RuntimeError:
            text = "There is not even enough for CUDA itself"
        held = [f"{purpose} {format_bytes(size)}" for purpose, size in self.taken.items() if size]
        if held:
            text += f"; this engine has taken: {', '.join(held)}"
        others = other_processes(self.device)
        return f"{text}; others that hold some: {', '.join(others)}" if others else text

    def facts(self) -> dict[str, str | int | float | bool]:
        """The device and its memory once the runner is built."""
        if self.device.type == "cpu":
            return {"device_name": "cpu", "free_bytes": free_memory(self.device)}
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "device_name": torch.cuda.get_device_name(self.device),
            "graphs_bytes": self.taken.get("CUDA graphs", 0),
            "free_bytes": free,
            "total_bytes": total,
        }


class NoAttention:
    """Stands in for attention while memory is measured: returns a copy of the queries, as large as its output."""

    def __init__(self, shape: AttentionShape) -> None:
        self._output_size = shape.output_size

    def target(self, layer: int) -> WriteKV:
        return lambda k, v: None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E] -> [T, H * V]."""
        out = q.new_zeros(*q.shape[:2], self._output_size)
        size = min(q.shape[2], self._output_size)
        out[..., :size] = q[..., :size]
        return out.flatten(1)


def captured_bytes(model: Model, largest: LargestStep, step_bytes: int) -> int:
    """Memory that the graphs of steps with prompts keep: the intermediate tensors of the largest of these steps, which
    all share, and the buffers of q, k, v, the attention output and input embeddings. ``step_bytes``: peak memory of a
    step of ``largest.num_tokens`` without graphs.
    """
    shape = model.attention_shape
    token_size = shape.num_input_heads * shape.query_size
    token_size += shape.num_heads * shape.output_size + (model.hidden_size if model.input_spec.embeddings else 0)
    kept = largest.num_captured * token_size * model.dtype.itemsize
    return kept + step_bytes * largest.num_captured // largest.num_tokens


@torch.inference_mode()
def peak_memory(model: Model, device: torch.device, largest: LargestStep, adapters: AdapterRows | None = None) -> int:
    """Bytes that the largest step takes beside weights and pool, with the fp32 logits of ``SAMPLED_ROWS`` rows. The
    token counts of penalties are not included.

    Raises:
        torch.OutOfMemoryError: not even that step fits.
    """
    attention = NoAttention(model.attention_shape)
    with compile_only():  # warm-up: what kernels and libraries allocate once is no part of a step
        for num_rows in _WARMUP_ROWS:
            ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
            model.compute_logits(model.forward(model_inputs(model, ids, ids), attention))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(largest.num_tokens, dtype=torch.int64, device=device)
    hidden = model.forward(model_inputs(model, ids, ids, adapters=adapters), attention)
    logits = model.compute_logits(hidden[: max(largest.num_rows, SAMPLED_ROWS)])
    logits[:SAMPLED_ROWS].to(torch.float32, copy=True)
    del hidden, logits
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def image_memory(model: VisionModel, device: torch.device, num_tokens: int) -> tuple[int, int]:
    """Bytes that the largest image of up to ``num_tokens`` tokens takes while its features are computed, and those of
    the features, which are among them.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    for small in _WARMUP_IMAGES:
        model.encode_image(model.largest_image(small))
    arrays = model.largest_image(num_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # copied here, for memory through which the model would copy them would stay pinned
    feature_bytes = model.encode_image({name: array.to(device) for name, array in arrays.items()}).nbytes
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak, feature_bytes


def other_processes(device: torch.device) -> list[str]:
    """Other processes with memory of this GPU, as "process 12 (python) 3.1 GiB"; empty where they cannot be listed."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return []
    return listed_processes(output, os.getpid())


def listed_processes(output: str, own_pid: int) -> list[str]:
    """From lines "pid, path, MiB"."""
    found: list[str] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit() and int(fields[0]) != own_pid:
            size = f" {format_bytes(int(fields[2]) << 20)}" if fields[2].isdigit() else ""
            found.append(f"process {fields[0]} ({Path(fields[1]).name}){size}")
    return found


@dataclass(frozen=True, slots=True)
class Demand:
    """The requested size of the pool.

    Attributes:
        num_tokens: the requested number of tokens; None: as many as fit, at most ``max_tokens``.
        groups: the groups of layers that have pages.
        page_bytes: of a page of one group.
        max_tokens: a pool of more tokens would never be full.
    """

    num_tokens: int | None
    groups: PageGroups
    page_bytes: int
    context_length: int
    max_tokens: int

    def pages_in(self, num_tokens: int) -> int:
        """The pages for this many tokens of requests of the context length."""
        return self.groups.pages_in(num_tokens, self.context_length)


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Memory for the pool.

    Attributes:
        free_bytes: limit of a pool whose size the user gave: all memory that is left.
        usable_bytes: limit of a pool of the default size, which keeps to ``mem_fraction_static``.
        explanation: how the limits came about, for error messages.
    """

    free_bytes: int
    usable_bytes: int
    explanation: str


def format_bytes(num_bytes: int) -> str:
    """ "1.5 GiB" or "300 MiB" """
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def kv_bytes_per_token(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return math.prod(kv_pool_shape(shape, num_pages=1, page_size=1)) * dtype.itemsize


def page_bytes(shape: AttentionShape, dtype: torch.dtype, page_size: int) -> int:
    """Of a page: for all layers, or for those of the largest group, where groups have pages of their own."""
    part = shape.part(shape.groups[0]) if shape.page_windows else shape
    return kv_bytes_per_token(part, dtype) * page_size


def fit_pages(demand: Demand, budget: PoolBudget) -> int:
    """The number of pages of the pool.

    Raises:
        ValueError: the requested pages do not fit, or not even one context fits.
    """
    if demand.num_tokens is not None:
        return _check_given(demand, demand.num_tokens, budget)
    most = demand.pages_in(demand.max_tokens)
    num_pages = min(budget.usable_bytes // demand.page_bytes, most) if demand.page_bytes else most
    if num_pages < demand.groups.pages_for(demand.context_length):
        need = demand.pages_in(demand.context_length) * demand.page_bytes
        num_tokens = demand.groups.tokens_in(max(num_pages, 0), demand.context_length)
        message = (
            f"the KV pool has room for {num_tokens} tokens, but one context has "
            f"{demand.context_length} and needs {format_bytes(need)}; {budget.explanation}. Lower context_length, "
            "raise mem_fraction_static, or free some memory"
        )
        raise ValueError(message)
    return num_pages


def fit_states(num_wanted: int, slot_bytes: int, demand: Demand, budget: PoolBudget) -> tuple[int, PoolBudget]:
    """The number of requests whose states fit, up to ``num_wanted``, and what is left for the KV pool.

    The states take at most half of the memory, or what a pool of a requested size leaves. One more slot is for rows
    that pad a CUDA graph.

    Raises:
        ValueError: not even those of one request fit.
    """
    room = budget.usable_bytes // 2
    if demand.num_tokens is not None:
        room = budget.free_bytes - demand.pages_in(demand.num_tokens) * demand.page_bytes
    num_slots = min(num_wanted, room // slot_bytes - 1)
    if num_slots < 1:
        message = (
            f"the states of a request of this model take {format_bytes(slot_bytes)}, and there is room for "
            f"{format_bytes(max(room, 0))}, of which graphs take as much as a request; {budget.explanation}. Lower "
            "max_total_tokens, raise mem_fraction_static, or free some memory"
        )
        raise ValueError(message)
    taken = (num_slots + 1) * slot_bytes
    requests = checks.counted(num_slots, "request")
    explanation = f"{budget.explanation}; the states of {requests} take {format_bytes(taken)}"
    return num_slots, PoolBudget(max(budget.free_bytes - taken, 0), max(budget.usable_bytes - taken, 0), explanation)


def fit_snapshots(slot_bytes: int, num_rows: int, demand: Demand, budget: PoolBudget) -> tuple[int, PoolBudget]:
    """The number of snapshots of states that fit, and what is left for the KV pool.

    They take a quarter of the memory at most, or what a pool of a requested size leaves of it; never that of one
    context. More than a few for each of the ``num_rows`` requests that run at once would hardly be used again.
    """
    num_tokens, limit = demand.num_tokens, budget.free_bytes
    if num_tokens is None:
        num_tokens, limit = demand.context_length, budget.usable_bytes
    room = min(limit // 4, limit - demand.pages_in(num_tokens) * demand.page_bytes)
    num_snapshots = max(min(SNAPSHOTS_PER_ROW * num_rows, room // slot_bytes), 0)
    taken = num_snapshots * slot_bytes
    explanation = f"{budget.explanation}; {num_snapshots} snapshots of states take {format_bytes(taken)}"
    return num_snapshots, PoolBudget(budget.free_bytes - taken, budget.usable_bytes - taken, explanation)


def _check_given(demand: Demand, num_tokens: int, budget: PoolBudget) -> int:
    num_pages = demand.pages_in(num_tokens)
    if num_pages < 1:
        message = (
            f"the KV pool must have at least one page of {demand.groups.page_size} tokens, not {num_tokens} tokens"
        )
        raise ValueError(message)
    need = num_pages * demand.page_bytes
    if need > budget.free_bytes:
        message = (
            f"a KV pool of {num_tokens} tokens needs {format_bytes(need)}, but there is room for "
            f"{format_bytes(budget.free_bytes)}; {budget.explanation}. Lower max_total_tokens"
        )
        raise ValueError(message)
    return num_pages


def free_memory(device: torch.device, *, root: Path = Path("/")) -> int:
    """Bytes that can still be taken on the device; ``root`` is where proc and sys are mounted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory(root)
