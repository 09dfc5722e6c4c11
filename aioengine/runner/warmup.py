"""Prepares a runner on a GPU before its first request: captures CUDA graphs and runs warm-up steps, so that no request
waits for a compiler.

Triton compiles a specialization of a kernel for each class of its arguments: a number that is 1 or a multiple of 16,
the next power of two of a small number of rows. The warm-up sizes cover all classes. Each size runs as prompts, as a
decode step and as both together, with plain sampling, greedy sampling, penalties and biases. The last warm-up step
is the largest possible step: matmuls of many rows have separate kernels, and the memory allocator keeps its memory for
all smaller steps.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import NamedTuple

import torch

from aioengine.attention._base import CapturableAttention, FullGraphAttention
from aioengine.families._config import Task
from aioengine.models._base import Model
from aioengine.protocol.messages import Progress, Sampling
from aioengine.runner.device_memory import NoAttention
from aioengine.runner.graphs.encoder_graphs import EncoderGraphs
from aioengine.runner.graphs.ladder import MAX_WARM_TOKENS, longest_graph
from aioengine.runner.graphs.piece_graphs import PieceGraphs
from aioengine.runner.inputs import model_inputs
from aioengine.runner.lora.grouping import TileRows
from aioengine.runner.model_runner import DeviceParts, ModelRunner
from aioengine.runner.pooler import MEAN
from aioengine.runner.timing import StartTimes
from aioengine.scheduler.plan import NOTHING, TOKENS, VECTOR, NewRow, Row, StepPlan
from aioengine.settings.config import TRANSFORMERS
from aioengine.settings.memory_model import SAMPLED_ROWS

logger = logging.getLogger(__name__)

TOKENS_APART = 31
"""Distance between the token counts whose kernels are loaded. cuBLAS chooses a matmul kernel by the number of tiles,
and perhaps by the powers of two that divide the number of tokens. So the distance is odd.
"""

SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 80)
ADAPTER_SIZES = (2, 80, 300)
"""Lengths of prompts with an adapter: its kernels have specializations for few, more and many tokens."""
NUM_TOKENS = 5
"""Prompt and output tokens of a row in warm-up steps of many rows."""

_TOKEN = 0
_PLAIN = (Sampling(1),)
_MIXED = (
    Sampling(2, top_k=5, top_p=0.9, min_p=0.01),
    Sampling(3, temperature=0.0),
    Sampling(4, frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1, top_p=0.9),
    Sampling(5, bias_token_ids=(_TOKEN,), logit_bias=(1.0,), min_new_tokens=9, suppressed_token_ids=(_TOKEN,)),
)


def token_counts(largest: int, longest_graph: int) -> range:
    """Return token counts without CUDA graphs, from ``largest`` down in steps of ``TOKENS_APART``."""
    return range(min(largest, MAX_WARM_TOKENS), longest_graph, -TOKENS_APART)


@torch.inference_mode()
def load_kernels(model: Model, counts: Iterable[int]) -> None:
    """Run the shortened model with each token count, to load its kernels. When CUDA loads a kernel during a step, it
    waits for all queued work.
    """
    model = model.shortened()
    for num_tokens in counts:
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=model.device)
        model.forward(model_inputs(model, ids, ids), NoAttention(model.attention_shape))


def warm_up_device(
    runner: ModelRunner, parts: DeviceParts, *, report: Callable[[Progress], None], times: StartTimes
) -> None:
    """Capture CUDA graphs where the attention backend supports it, and run all warm-up steps."""
    settings = parts.settings
    for attention in (parts.attention, None if parts.draft is None else parts.draft.attention):
        if isinstance(attention, CapturableAttention):
            attention.warm_up()
    if settings.runner.cuda_graph_max_rows:
        is_foreign = settings.model.implementation == TRANSFORMERS
        if is_foreign and (reason := why_it_waits(parts.model, parts.device)):
            logger.info(
                "steps run without CUDA graphs: transformers' code for this model waits for the device (%s)", reason
            )
        else:
            capture_graphs(runner, parts, report)
    times.end("graphs")
    limits = settings.scheduler
    longest = longest_graph(settings, parts.model.num_active) if runner.prompt_graphs else 0
    load_kernels(parts.model, token_counts(limits.max_step_tokens, longest))
    groups = parts.kv_pool.groups
    num_groups = 1 if groups is None else groups.num_groups
    bounds = WarmupLimits(
        limits.max_running,
        limits.chunk_tokens,
        settings.model.context_length,
        parts.kv_pool.num_pages // num_groups,
        parts.model.task is Task.GENERATE,
        num_groups,
    )
    run_warmup_steps(runner, bounds, report)
    times.end("warmup")


@torch.inference_mode()
def why_it_waits(model: Model, device: torch.device) -> str:
    """Return CUDA's error message if a step of the model waits for the device; empty if it does not wait.

    This is checked before a capture, because a failed capture leaves the memory allocator in a broken state.
    """
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    for mode in ("default", "error"):  # libraries may wait on first use
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)
        try:
            model.compute_logits(model.forward(model_inputs(model, ids, ids), NoAttention(model.attention_shape)))
        except RuntimeError as error:
            if mode == "default":
                raise
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


@torch.inference_mode()
def capture_graphs(runner: ModelRunner, parts: DeviceParts, report: Callable[[Progress], None]) -> None:
    """Capture CUDA graphs where the attention backend supports it. No request may be open."""
    # Garbage collection may free graphs and events of a discarded runner in the same process. These CUDA calls would
    # make a running capture invalid.
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if isinstance(parts.attention, CapturableAttention) and parts.model.task is Task.GENERATE:
            max_rows = parts.settings.runner.cuda_graph_max_rows
            runner.capture_graphs(max_rows, lambda done, total: report(Progress("capturing CUDA graphs", done, total)))
        graphs = _prompt_graphs(parts)
        if graphs is not None:
            longest = longest_graph(parts.settings, parts.model.num_active)
            graphs.capture(
                longest, lambda done, total: report(Progress("capturing CUDA graphs of prompts", done, total))
            )
            runner.prompt_graphs = graphs
    finally:
        if was_enabled:
            gc.enable()


def _prompt_graphs(parts: DeviceParts) -> PieceGraphs | EncoderGraphs | None:
    """Return graphs for steps with prompts, not captured yet; None: the attention backend does not support them."""
    attention, limits = parts.attention, parts.settings.scheduler
    max_rows = limits.max_running
    if isinstance(attention, CapturableAttention):
        # a row with drafts also returns the hidden state before each of them
        max_outputs = max(max_rows, min(max_rows * (1 + limits.max_drafts), SAMPLED_ROWS))
        group = None if parts.adapters is None else parts.adapters.group
        tiles = group if isinstance(group, TileRows) else None
        layers = parts.kv_pool.layers
        return PieceGraphs(parts.model, attention, layers, max_outputs=max_outputs, adapters=tiles, states=parts.states)
    if isinstance(attention, FullGraphAttention) and attention.has_kernel:
        is_mean = parts.settings.model.pooling.kind == MEAN
        max_length = parts.settings.model.context_length
        return EncoderGraphs(parts.model, attention, max_rows=max_rows, max_length=max_length, returns_all=is_mean)
    return None


class WarmupLimits(NamedTuple):
    """Limits of warm-up steps.

    max_rows, max_tokens: of a step. context_length: tokens of a request. num_pages: pages of the pool for each of
    ``num_groups`` page groups. samples: False for a model that only computes vectors.
    """

    max_rows: int
    max_tokens: int
    context_length: int
    num_pages: int
    samples: bool = True
    num_groups: int = 1


def run_warmup_steps(runner: ModelRunner, limits: WarmupLimits, report: Callable[[Progress], None]) -> None:
    """Run steps of all kinds within the limits, and close their requests. No other request may have pages."""
    page_size = int(runner.facts["page_size"])
    if limits.context_length < NUM_TOKENS:
        return
    max_rows = min(limits.max_rows, limits.max_tokens, limits.num_pages // -(-NUM_TOKENS // page_size))
    sizes = [size for size in SIZES if size <= max_rows]
    total = len(sizes) + 1
    report(Progress("warming up", 0, total))

    def run(plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            if plan.num_tokens <= limits.max_tokens:
                runner.collect(runner.launch(plan))

    for num_done, size in enumerate(sizes, 1):
        if limits.samples:
            run(_many_rows(size, page_size, limits.num_groups))
        if size < limits.context_length and -(-(size + 1) // page_size) <= limits.num_pages:
            run(_prompts(1, size, page_size, limits))
        report(Progress("warming up", num_done, total))
    for size in ADAPTER_SIZES if runner.adapters is not None else ():
        if size <= min(limits.max_tokens, limits.context_length - 1, limits.num_pages * page_size - 1):
            run(_prompts(1, size, page_size, limits, adapter_slot=1))  # an empty slot has no effect
    # the maximum number of rows, and about the maximum number of tokens
    num_rows = min(limits.max_rows, limits.max_tokens // 2, limits.num_pages)
    if num_rows:
        size = min(limits.max_tokens // num_rows, limits.context_length - 1, limits.num_pages // num_rows * page_size)
        run(_prompts(num_rows, size, page_size, limits))
    report(Progress("warming up", total, total))


def _many_rows(size: int, page_size: int, num_groups: int) -> Iterator[StepPlan]:
    """Yield prompts of one token, a decode step, decode rows with longer prompts, and with chunks without output."""
    uids = list(range(size))
    num_pages = -(-NUM_TOKENS // page_size) * num_groups
    pages = [list(range(uid * num_pages, (uid + 1) * num_pages)) for uid in uids]
    for samplings in (_PLAIN, _MIXED):
        sampling = list(islice(cycle(samplings), size))
        opened = [NewRow(uid, sampling[uid], 1, [_TOKEN], pages[uid]) for uid in uids]
        yield StepPlan([Row(uid, 0, 1, TOKENS, [_TOKEN]) for uid in uids], opened)
        yield StepPlan([Row(uid, 1, 1, TOKENS) for uid in uids])
        reopened = uids[size // 2 :]  # these are opened again with three tokens
        opened = [NewRow(uid, sampling[uid], 3, [_TOKEN] * 3, pages[uid]) for uid in reopened]
        decoding = uids[: size // 2]
        prompts = [Row(uid, 0, 3, TOKENS, [_TOKEN] * 3) for uid in reopened]
        yield StepPlan([*(Row(uid, 2, 1, TOKENS) for uid in decoding), *prompts], opened, closed=reopened)
        chunks = [Row(uid, 3, 2, NOTHING, [_TOKEN] * 2) for uid in reopened]
        yield StepPlan([*(Row(uid, 3, 1, TOKENS) for uid in decoding), *chunks])
        yield StepPlan([], closed=uids)


def _prompts(
    num_rows: int, size: int, page_size: int, limits: WarmupLimits, *, adapter_slot: int = 0
) -> Iterator[StepPlan]:
    """Yield a step with prompts of ``size`` tokens."""
    ids, num_pages = [_TOKEN] * size, -(-size // page_size) * limits.num_groups
    pages = [list(range(uid * num_pages, (uid + 1) * num_pages)) for uid in range(num_rows)]
    opened = [NewRow(uid, _PLAIN[0], size, ids, pages[uid], adapter_slot=adapter_slot) for uid in range(num_rows)]
    outputs = TOKENS if limits.samples else VECTOR
    yield StepPlan([Row(uid, 0, size, outputs, ids) for uid in range(num_rows)], opened)
    yield StepPlan([], closed=list(range(num_rows)))
