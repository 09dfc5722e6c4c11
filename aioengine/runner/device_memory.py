"""Device memory: usage by purpose, the size of the KV pool, and the errors if memory is short.

The memory of a step beside weights and pool is measured, so that steps never run out of memory. The free memory of a
CPU is the available memory of the machine, limited by its control groups (version 1 and 2, all ancestors). Droppable
file pages count as free.
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
"""Reserved for kernel workspaces and for decode graphs, whose shared pool has about the size of one step."""

SAMPLED_ROWS = 256
"""Maximum rows that the sampler processes at once, with fp32 logits, to limit its memory."""

MAX_IMAGE_TOKENS = 16_384
"""Tokens of the largest image for which memory is reserved: the limit in Qwen's model files."""

_WARMUP_ROWS = 1, 2, 17, 33, 65
"""Row counts run before a measurement: one for each range of row counts with a separate matmul kernel."""

_WARMUP_IMAGES = 1, 4
"""Tokens of images run before a measurement: kernels have specializations for multiples of 16 patches."""

_SMI_TIMEOUT_S = 10.0


class LargestStep(NamedTuple):
    """Upper limits of a step.

    Attributes:
        num_tokens: tokens of a step.
        num_rows: rows of a step that sample.
        num_captured: tokens of the largest step with prompts that has CUDA graphs; 0: there are no such graphs.
        image_tokens: tokens of the largest image in a prompt.
    """

    num_tokens: int
    num_rows: int
    num_captured: int
    image_tokens: int = MAX_IMAGE_TOKENS


class DeviceMemory:
    """Records the memory of one device that this process has allocated, by purpose. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.taken: dict[str, int] = {}

    @contextmanager
    def take(self, purpose: str, *, advice: str, need: int | None = None) -> Iterator[None]:
        """Record the memory that the body allocates under ``purpose``. need: its bytes, if known, for the message.

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
            needed = "" if need is None else f" ({format_bytes(need)})"
            cause = str(error).split(". ")[0]
            message = f"not enough GPU memory for {purpose}{needed}: {cause}. {self.describe()}. {advice}"
            raise ValueError(message) from None
        torch.cuda.synchronize(self.device)
        self.taken[purpose] = torch.cuda.memory_reserved(self.device) - before

    def pool_budget(
        self, model: Model, largest: LargestStep, *, fraction: float, adapters: AdapterRows | None = None
    ) -> PoolBudget:
        """Return the memory for the KV pool after the weights are loaded.

        fraction: the engine's share of all memory. adapters: the rows of a step of ``largest.num_tokens`` tokens with
        an adapter; None: there are no adapters.
        """
        if self.device.type == "cpu":
            free = free_memory(self.device)
            explanation = f"{format_bytes(free)} are free, and mem_fraction_static={fraction:g} of it may be used"
            return PoolBudget(free, int(free * fraction), explanation)
        advice = "Lower chunked_prefill_size or max_running_requests"
        with self.take("a step of the largest size", advice=advice):
            peak = peak_memory(model, self.device, largest, adapters)
        steps = peak + peak // 4  # margin for fragmentation by steps of different sizes
        images = self._images_budget(model, largest, steps) if isinstance(model, VisionModel) else 0
        counts = 4 * largest.num_rows * model.vocab_size  # the token counts of penalties
        # 2 * counts: while the count table grows, the old and the new table exist
        reserved = steps + images + 2 * counts + GRAPHS_BYTES + captured_bytes(model, largest, steps)
        free, total = torch.cuda.mem_get_info(self.device)
        left = int(free - (1.0 - fraction) * total)
        explanation = (
            f"{self.describe()}. mem_fraction_static={fraction:g} leaves {format_bytes(max(left, 0))}; the largest "
            f"step and the CUDA graphs need {format_bytes(reserved)} of it"
        )
        return PoolBudget(max(free - reserved, 0), max(left - reserved, 0), explanation)

    def _images_budget(self, model: VisionModel, largest: LargestStep, steps: int) -> int:
        """Return the memory for images beyond ``steps``. The vision tower runs before the step, in the same memory."""
        with self.take("the largest image", advice="Lower context_length, which limits the images of a prompt"):
            peak, feature_bytes = image_memory(model, self.device, largest.image_tokens)
        return max(peak + peak // 4 - steps, 0) + feature_bytes + GPU_FEATURE_BYTES

    def describe(self) -> str:
        """Describe total and free memory, and the memory of this engine and of other processes."""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
            name = torch.cuda.get_device_name(self.device)
            text = f"{name} has {format_bytes(total)}, {format_bytes(free)} free"
        except RuntimeError:
            text = "CUDA itself is out of memory"
        own = [f"{purpose} {format_bytes(size)}" for purpose, size in self.taken.items() if size]
        if own:
            text += f"; used by this engine: {', '.join(own)}"
        processes = other_processes(self.device)
        return f"{text}; used by other processes: {', '.join(processes)}" if processes else text

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return the device and its memory after the runner is built."""
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
    """Replaces attention while memory is measured: returns a copy of the queries in the size of the output."""

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
    """Return the memory of the graphs of steps with prompts: the intermediate tensors of the largest step, which all
    graphs share, and the buffers of q, k, v, attention output and input embeddings.

    step_bytes: peak memory of a step of ``largest.num_tokens`` tokens without graphs.
    """
    shape = model.attention_shape
    token_size = shape.num_input_heads * shape.query_size
    token_size += shape.num_heads * shape.output_size + (model.hidden_size if model.input_spec.embeddings else 0)
    buffers = largest.num_captured * token_size * model.dtype.itemsize
    return buffers + step_bytes * largest.num_captured // largest.num_tokens


@torch.inference_mode()
def peak_memory(model: Model, device: torch.device, largest: LargestStep, adapters: AdapterRows | None = None) -> int:
    """Measure the bytes of the largest step beside weights and pool, with the fp32 logits of ``SAMPLED_ROWS`` rows,
    without the token counts of penalties.

    Raises:
        torch.OutOfMemoryError: the step does not fit.
    """
    attention = NoAttention(model.attention_shape)
    with compile_only():  # warm up: one-time allocations of kernels and libraries are not part of a step
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
    """Measure the bytes that the largest image of up to ``num_tokens`` tokens needs while its features are computed.
    Return them and the bytes of the features, which are included.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    for small in _WARMUP_IMAGES:
        model.encode_image(model.largest_image(small))
    arrays = model.largest_image(num_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # copied here, because the model would copy through pinned memory that is never freed
    feature_bytes = model.encode_image({name: array.to(device) for name, array in arrays.items()}).nbytes
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak, feature_bytes


def other_processes(device: torch.device) -> list[str]:
    """List other processes with memory of this GPU as "process 12 (python) 3.1 GiB"; empty if they are unknown."""
    command = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return []
    return listed_processes(output, os.getpid())


def listed_processes(output: str, own_pid: int) -> list[str]:
    """Parse lines "pid, path, MiB" of nvidia-smi."""
    processes: list[str] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit() and int(fields[0]) != own_pid:
            size = f" {format_bytes(int(fields[2]) << 20)}" if fields[2].isdigit() else ""
            processes.append(f"process {fields[0]} ({Path(fields[1]).name}){size}")
    return processes


@dataclass(frozen=True, slots=True)
class Demand:
    """The requested size of the pool.

    Attributes:
        num_tokens: the requested number of tokens; None: as many as fit, at most ``max_tokens``.
        groups: the layer groups with page tables.
        page_bytes: bytes of a page of one group.
        max_tokens: the most tokens that running requests can have.
    """

    num_tokens: int | None
    groups: PageGroups
    page_bytes: int
    context_length: int
    max_tokens: int

    def pages_in(self, num_tokens: int) -> int:
        """Return the number of pages for this many tokens of requests of the context length."""
        return self.groups.pages_in(num_tokens, self.context_length)


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Memory for the pool.

    Attributes:
        free_bytes: limit of a pool of requested size: all free memory.
        usable_bytes: limit of a pool of default size, by ``mem_fraction_static``.
        explanation: the reasons for the limits, for error messages.
    """

    free_bytes: int
    usable_bytes: int
    explanation: str


def format_bytes(num_bytes: int) -> str:
    """ "1.5 GiB" or "300 MiB" """
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def kv_bytes_per_token(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return math.prod(kv_pool_shape(shape, num_pages=1, page_size=1)) * dtype.itemsize


def page_bytes(shape: AttentionShape, dtype: torch.dtype, page_size: int) -> int:
    """Return the bytes of a page: all layers, or the largest layer group if groups have separate page tables."""
    part = shape.part(shape.groups[0]) if shape.page_windows else shape
    return kv_bytes_per_token(part, dtype) * page_size


def fit_pages(demand: Demand, budget: PoolBudget) -> int:
    """Return the number of pages of the pool.

    Raises:
        ValueError: the requested pages do not fit, or one request of the context length does not fit.
    """
    if demand.num_tokens is not None:
        return _check_requested(demand, demand.num_tokens, budget)
    max_pages = demand.pages_in(demand.max_tokens)
    num_pages = min(budget.usable_bytes // demand.page_bytes, max_pages) if demand.page_bytes else max_pages
    if num_pages < demand.groups.pages_for(demand.context_length):
        need = demand.pages_in(demand.context_length) * demand.page_bytes
        num_tokens = demand.groups.tokens_in(max(num_pages, 0), demand.context_length)
        message = (
            f"the KV pool has a capacity of {num_tokens} tokens, but one request may have {demand.context_length} "
            f"(context_length), which need {format_bytes(need)}; {budget.explanation}. Lower context_length, raise "
            "mem_fraction_static, or free memory"
        )
        raise ValueError(message)
    return num_pages


def fit_states(num_wanted: int, slot_bytes: int, demand: Demand, budget: PoolBudget) -> tuple[int, PoolBudget]:
    """Return the number of requests whose states fit, up to ``num_wanted``, and the memory left for the KV pool.

    States use at most half of the memory, or the memory left by a pool of requested size. One more slot is for padding
    rows of CUDA graphs.

    Raises:
        ValueError: the states of one request do not fit.
    """
    limit = budget.usable_bytes // 2
    if demand.num_tokens is not None:
        limit = budget.free_bytes - demand.pages_in(demand.num_tokens) * demand.page_bytes
    num_slots = min(num_wanted, limit // slot_bytes - 1)
    if num_slots < 1:
        message = (
            f"the states of one request of this model need {format_bytes(slot_bytes)}, and the CUDA graphs as much "
            f"again, but only {format_bytes(max(limit, 0))} are available; {budget.explanation}. Lower "
            "max_total_tokens, raise mem_fraction_static, or free memory"
        )
        raise ValueError(message)
    used = (num_slots + 1) * slot_bytes
    requests = checks.counted(num_slots, "request")
    explanation = f"{budget.explanation}; the states of {requests} need {format_bytes(used)}"
    return num_slots, PoolBudget(max(budget.free_bytes - used, 0), max(budget.usable_bytes - used, 0), explanation)


def fit_snapshots(slot_bytes: int, num_rows: int, demand: Demand, budget: PoolBudget) -> tuple[int, PoolBudget]:
    """Return the number of snapshots of states that fit, and the memory left for the KV pool.

    Snapshots use at most a quarter of the memory, or the memory left by a pool of requested size. They leave memory for
    one request of the context length. Their number is limited to a few for each of the ``num_rows`` running requests.
    """
    num_tokens, limit = demand.num_tokens, budget.free_bytes
    if num_tokens is None:
        num_tokens, limit = demand.context_length, budget.usable_bytes
    available = min(limit // 4, limit - demand.pages_in(num_tokens) * demand.page_bytes)
    num_snapshots = max(min(SNAPSHOTS_PER_ROW * num_rows, available // slot_bytes), 0)
    used = num_snapshots * slot_bytes
    explanation = f"{budget.explanation}; {num_snapshots} snapshots of states need {format_bytes(used)}"
    return num_snapshots, PoolBudget(budget.free_bytes - used, budget.usable_bytes - used, explanation)


def _check_requested(demand: Demand, num_tokens: int, budget: PoolBudget) -> int:
    num_pages = demand.pages_in(num_tokens)
    if num_pages < 1:
        message = (
            f"the KV pool must have at least one page of {demand.groups.page_size} tokens, got {num_tokens} tokens"
        )
        raise ValueError(message)
    need = num_pages * demand.page_bytes
    if need > budget.free_bytes:
        message = (
            f"a KV pool of {num_tokens} tokens needs {format_bytes(need)}, but only "
            f"{format_bytes(budget.free_bytes)} are available; {budget.explanation}. Lower max_total_tokens"
        )
        raise ValueError(message)
    return num_pages


def free_memory(device: torch.device, *, root: Path = Path("/")) -> int:
    """Return the free bytes of the device. root: where proc and sys are mounted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory(root)
