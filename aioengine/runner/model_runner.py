"""The device side of a step: a plan in, token ids out. ``build`` makes the runner that ``settings`` describe."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn import functional

from aioengine.kernels.triton.launcher import compiled_in_threads
from aioengine.runner import logits as logits_processors
from aioengine.runner.capacity import Demand, fit_pages, kv_bytes_per_token
from aioengine.runner.device_memory import DeviceMemory, LargestStep
from aioengine.runner.inputs import InputBuilder
from aioengine.runner.kv_pool import KVPool
from aioengine.runner.loading import load_model
from aioengine.runner.preparation import longest_graph, prepare_device
from aioengine.runner.ranges import part
from aioengine.runner.readback import Readback
from aioengine.runner.rows import RowTable
from aioengine.runner.sampling.sampler import FAILED, Sampler
from aioengine.runner.start_times import StartTimes
from aioengine.runner.vocabulary import sampled_vocab_size
from aioengine.scheduler.plan import TOKENS, StepResult, UnknownOrderError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import AttentionBackend, AttentionShape, ForwardBatch
    from aioengine.config import Settings
    from aioengine.models._base import Model, ModelInputs
    from aioengine.protocol.messages import Control, Progress, Reply
    from aioengine.runner.graphs.decode_graphs import DecodeGraphs
    from aioengine.runner.graphs.prompt_graphs import PromptGraphs
    from aioengine.runner.inputs import StepRows
    from aioengine.runner.logits import LogitsProcessor
    from aioengine.runner.rows import RequestRow, SampledRows
    from aioengine.scheduler.plan import Plan, Row

    Facts = dict[str, str | int | float | bool]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_LESS_POOL = "Lower mem_fraction_static or max_total_tokens"
_LESS_GRAPHS = "Lower mem_fraction_static or cuda_graph_max_bs, or set disable_cuda_graph=True"

_NOT_FINITE = "the model gave numbers that are not finite for it; its weights or its dtype make it overflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """What stands on the device once the weights are loaded."""

    model: Model
    attention: AttentionBackend
    kv_pool: KVPool
    vocab_size: int
    context_length: int
    max_rows: int
    device: torch.device

    @property
    def max_row_pages(self) -> int:
        return -(-self.context_length // self.kv_pool.page_size)  # a step in flight computes no position past the end


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step.

    wanted: uids of the rows that sample, in the order of the plan. sampled: those that were computed. silent: uids of
    the computed rows that do not sample. values: a token for each of ``sampled``, then for each of ``silent`` 0 or,
    where its numbers are bad, FAILED. failed: rows that were not computed.
    """

    wanted: list[int]
    sampled: list[int]
    silent: list[int]
    values: Readback
    failed: dict[int, str]


class ModelRunner:
    """Computes plans, one after the other on the CPU, queued on a GPU.

    A row that cannot be computed or sampled fails alone: its uid is in ``StepResult.failed`` whenever it is in a plan,
    until it is closed.
    """

    def __init__(self, parts: DeviceParts, facts: Facts) -> None:
        self.facts = facts
        self._model = parts.model
        self._attention = parts.attention
        self._kv_pool = parts.kv_pool
        self._device = parts.device
        processors = logits_processors.load()
        num_embeddings = parts.model.vocab_size
        page_size = parts.kv_pool.page_size
        self._table = RowTable(
            max_row_pages=parts.max_row_pages,
            num_pages=parts.kv_pool.num_pages,
            num_embeddings=num_embeddings,
            device=parts.device,
            processors=processors,
            num_slots=parts.max_rows,
        )
        self._inputs = InputBuilder(self._table, page_size=page_size, num_embeddings=num_embeddings)
        self._vocab_size = min(parts.vocab_size, num_embeddings)
        self._sampler = _sampler(parts, self._table, processors)
        self._graphs: DecodeGraphs | None = None
        self.prompt_graphs: list[PromptGraphs] = []
        self._broken: dict[int, str] = {}
        self._poisoned: set[int] = set()
        self._newest: Ticket | None = None  # as long as it is not collected
        self._is_closed = False

    @torch.inference_mode()
    def capture_graphs(self, max_rows: int, report: Callable[[int, int], None]) -> None:
        """Decode steps of up to so many rows are CUDA graphs from now on; attention is a ``CapturableAttention``.

        ``report`` hears how many are captured, and of how many.
        """
        module = importlib.import_module("aioengine.runner.graphs.decode_graphs")
        graphs: DecodeGraphs = module.DecodeGraphs(
            self._model,
            self._attention,
            self._table,
            vocab_size=self._vocab_size,
            page_size=self._kv_pool.page_size,
        )
        graphs.capture(max_rows, report)
        self._graphs = graphs
        self.facts["cuda_graph_sizes"] = " ".join(map(str, graphs.sizes))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        """Begin the step. On the CPU it is also finished when this returns."""
        if self._is_closed:
            message = "the runner is closed"
            raise RuntimeError(message)
        with part("prepare"):
            self._change_requests(plan)
            rows = self._read(plan.rows)
        wanted = [row.uid for row in plan.rows if row.gives & TOKENS]
        broken = self._broken
        failed = {row.uid: broken[row.uid] for row in plan.rows if row.uid in broken} if broken else {}
        if not rows.requests:
            return Ticket(wanted, [], [], Readback(torch.empty(0, dtype=torch.int64)), failed)
        sampled = rows.requests
        silent: list[RequestRow] = []
        if not rows.samples.all():
            sampled, silent = [], []
            for request, samples in zip(rows.requests, rows.samples.tolist(), strict=True):
                (sampled if samples else silent).append(request)
        values = Readback(self._compute(rows, sampled))
        ticket = Ticket(wanted, [each.uid for each in sampled], [each.uid for each in silent], values, failed)
        self._newest = ticket
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and give its tokens: the one copy from the device to the host."""
        if ticket is self._newest:
            self._newest = None
        values = ticket.values.wait()
        if FAILED not in values and not ticket.failed:
            return StepResult(values[: len(ticket.sampled)])
        value_of = dict(zip([*ticket.sampled, *ticket.silent], values, strict=True))
        bad = [uid for uid, value in value_of.items() if value == FAILED]
        for uid in self._table.requests.keys() & bad:  # others were closed while the step was in flight
            self._break(uid, _NOT_FINITE)
            self._poisoned.add(uid)
        failed = {**ticket.failed, **dict.fromkeys(bad, _NOT_FINITE)}
        return StepResult([value_of.get(uid, FAILED) for uid in ticket.wanted], failed)

    def control(self, order: Control) -> Reply:
        """It implements no order yet.

        Raises:
            UnknownOrderError: always.
        """
        raise UnknownOrderError(order.name)

    def close(self) -> None:
        """Give the memory of the pool back. May be called twice; nothing can be launched after it."""
        self._is_closed = True
        self._kv_pool.release()

    def _change_requests(self, plan: Plan) -> None:
        if plan.closed and self._newest is not None:
            self._clean_behind(self._newest, plan.closed)
        for uid in plan.closed:
            self._close(uid)
        for opened in plan.opened:
            self._close(opened.uid)
            try:
                self._table.open(opened)
            except (ValueError, TypeError, OverflowError) as error:
                self._break(opened.uid, f"cannot set it up: {error}")
        for row in plan.rows:
            request = self._table.requests.get(row.uid) if row.new_pages else None
            if request is not None:
                try:
                    self._table.add_pages(request, row.new_pages)
                except ValueError as error:
                    self._break(row.uid, str(error))

    def _clean_behind(self, ticket: Ticket, closed: list[int]) -> None:
        """Pages of requests that go wrong in a step in flight: when that is known they may be another's already."""
        places = {uid: place for place, uid in enumerate([*ticket.sampled, *ticket.silent])}
        pages = {places[uid]: self._table.pages(uid) for uid in closed if uid in places}
        if pages:
            self._kv_pool.clean_marked(pages, ticket.values.source, self._table.upload)

    def _close(self, uid: int) -> None:
        self._broken.pop(uid, None)
        if uid in self._poisoned:
            self._poisoned.discard(uid)
            self._kv_pool.clean(self._table.pages(uid))
        self._table.close(uid)

    def _break(self, uid: int, message: str) -> None:
        self._broken.setdefault(uid, message)

    def _read(self, rows: list[Row]) -> StepRows:
        """The rows that can be computed; the others are broken from here on."""
        requests = self._table.requests
        live = [row for row in rows if row.uid in requests and row.uid not in self._broken]
        try:
            columns = self._inputs.read(live)
            if len(live) == len(rows) and self._inputs.is_valid(columns):
                return columns
        except OverflowError:  # a token id of more than 64 bits; it is found below
            pass
        for uid, error in self._inputs.find_errors([row for row in rows if row.uid not in self._broken]).items():
            self._break(uid, error)
        return self._inputs.read([row for row in live if row.uid not in self._broken])

    def _compute(self, rows: StepRows, sampled: list[RequestRow]) -> Tensor:
        """Forward and sampling of at least one row; gives ``Ticket.values``."""
        if self._graphs is not None and self._graphs.fits(rows):
            return self._replay(self._graphs, rows)
        with part("prepare"):
            inputs, batch = self._inputs.build(self._model, rows, num_outputs=self._num_padded(len(rows.requests)))
        hidden = self._forward(inputs, batch)
        if len(sampled) == len(rows.requests):
            return self._sample(hidden, self._table.sampled(sampled, rows.slots, rows.starts + rows.counts))
        # A bad number anywhere in a row has reached its last token through attention.
        silent_rows = self._table.upload(np.flatnonzero(~rows.samples))
        silent = torch.where(hidden[silent_rows].isfinite().all(-1), 0, FAILED)
        if not sampled:
            return silent
        slots, positions = rows.slots[rows.samples], (rows.starts + rows.counts)[rows.samples]
        sampled_rows = self._table.upload(np.flatnonzero(rows.samples))
        token_ids = self._sample(hidden[sampled_rows], self._table.sampled(sampled, slots, positions))
        return torch.cat([token_ids, silent])

    def _forward(self, inputs: ModelInputs, batch: ForwardBatch) -> Tensor:
        """Hidden states of the last token of each row."""
        if inputs.outputs is not None:
            for graphs in self.prompt_graphs:
                if graphs.fits(batch):
                    return graphs.replay(inputs, batch)
        with part("prepare"):
            self._attention.prepare(batch)
        return self._model.forward(inputs, self._attention)[: len(batch.query_lengths)]

    def _num_padded(self, num_rows: int) -> int:
        """As many rows as a decode step with a graph has: for matmuls of a new number of rows CUDA loads kernels, and
        before that waits for all queued work.
        """
        return num_rows if self._graphs is None else self._graphs.padded(num_rows)

    def _replay(self, graphs: DecodeGraphs, rows: StepRows) -> Tensor:
        sampled = self._table.sampled(rows.requests, rows.slots, rows.starts + rows.counts)
        step = graphs.replay(rows, sampled)
        if step.token_ids is None:
            return self._sample(step.hidden, sampled)
        return step.token_ids

    def _sample(self, hidden: Tensor, rows: SampledRows) -> Tensor:
        num_rows = len(hidden)
        num_missing = self._num_padded(num_rows) - num_rows
        padded = functional.pad(hidden, (0, 0, 0, num_missing)) if num_missing else hidden
        logits = self._model.compute_logits(padded)[:num_rows]
        with part("sample"):
            token_ids = self._sampler.sample(logits, rows)
            self._table.write_tokens(rows, token_ids)
        return token_ids


class _Samples(Protocol):
    """``sampler.Sampler``, or its form for a GPU."""

    def sample(self, logits: Tensor, rows: SampledRows) -> Tensor: ...


def _sampler(parts: DeviceParts, table: RowTable, processors: tuple[LogitsProcessor, ...]) -> _Samples:
    num_embeddings = parts.model.vocab_size
    vocab_size = min(parts.vocab_size, num_embeddings)
    if parts.device.type == "cpu":
        return Sampler(vocab_size=vocab_size, num_embeddings=num_embeddings, device=parts.device, processors=processors)
    if find_spec("triton") is None:
        message = "the package triton is not installed, which device='cuda' needs: torch's own wheels for CUDA bring it"
        raise ValueError(message)
    module = importlib.import_module("aioengine.runner.sampling.device_sampler")
    sampler: _Samples = module.DeviceSampler(
        vocab_size=vocab_size, num_embeddings=num_embeddings, table=table, processors=processors
    )
    return sampler


def build(settings: Settings, report: Callable[[Progress], None]) -> ModelRunner:
    """Load the model and take the KV pool.

    Sets the number of torch's threads, so it belongs into a process of its own.

    Raises:
        ValueError: the model, its weights, the device or the dtype cannot be used, or the memory does not suffice; the
            message says what would work.
    """
    device = _device(settings.runner.device)
    with compiled_in_threads(device):
        return _build(settings, device, report)


def _build(settings: Settings, device: torch.device, report: Callable[[Progress], None]) -> ModelRunner:
    times = StartTimes()
    torch.set_num_threads(settings.runner.num_threads)
    dtype = _dtype(settings.model.dtype, device)
    kv_dtype = _dtype(settings.memory.kv_dtype or settings.model.dtype, device)
    memory = DeviceMemory(device)
    page_size = settings.memory.page_size
    vocab_size = sampled_vocab_size(settings)
    model, choice, weights_bytes = load_model(
        settings, dtype, memory, kv_dtype=kv_dtype, vocab_size=vocab_size, report=report, times=times
    )
    shape = model.attention_shape
    limits = settings.scheduler
    num_captured = longest_graph(settings, weights_bytes, dtype)
    largest = LargestStep(limits.max_step_tokens, limits.max_running, num_captured)
    room = memory.room(model, largest, fraction=settings.memory.mem_fraction_static)
    num_pages = fit_pages(_demand(settings, shape, kv_dtype), room)
    times.end("largest_step")
    with memory.take("the KV pool and attention's workspace", advice=_LESS_POOL):
        kv_pool = KVPool(shape, num_pages=num_pages, page_size=page_size, dtype=kv_dtype, device=device)
        attention = choice.build(shape, kv_pool.tensor)
    times.end("kv_pool")
    parts = DeviceParts(
        model=model,
        attention=attention,
        kv_pool=kv_pool,
        vocab_size=vocab_size,
        context_length=settings.model.context_length,
        max_rows=settings.scheduler.max_running,
        device=device,
    )
    facts: Facts = {
        "num_pages": num_pages,
        "page_size": page_size,
        "max_total_tokens": num_pages * page_size,
        "dtype": settings.model.dtype,
        "device": str(device),
        "attention_backend": choice.name,
        "weights_bytes": weights_bytes,
        "kv_pool_bytes": kv_pool.num_bytes,
        "num_threads": torch.get_num_threads(),
    }
    if choice.warning:
        facts["warning"] = choice.warning
    with memory.take("CUDA graphs", advice=_LESS_GRAPHS):
        runner = ModelRunner(parts, facts)
        if device.type == "cuda":
            prepare_device(runner, parts, settings, report=report, times=times)
    facts |= memory.facts() | _versions() | times.facts()
    return runner


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"device {name!r} is not there: torch sees no usable NVIDIA GPU; device='cpu' works"
        raise ValueError(message)
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        message = f"dtype {name!r} is not known; what works: {', '.join(DTYPES)}"
        raise ValueError(message)
    if DTYPES[name] == torch.float16 and device.type == "cpu":
        message = "dtype 'float16' is not available on a CPU: it is slow there and overflows; use bfloat16 or float32"
        raise ValueError(message)
    return DTYPES[name]


def _versions() -> Facts:
    """Of what computes here: packages that are not installed are left out."""
    found: Facts = {}
    for package in ("torch", "triton", "flashinfer-python"):
        with suppress(metadata.PackageNotFoundError):
            found[f"{package.removesuffix('-python')}_version"] = metadata.version(package)
    return found


def _demand(settings: Settings, shape: AttentionShape, kv_dtype: torch.dtype) -> Demand:
    return Demand(
        num_pages=settings.memory.num_pages,
        page_size=settings.memory.page_size,
        bytes_per_token=kv_bytes_per_token(shape, kv_dtype),
        context_length=settings.model.context_length,
        max_tokens=settings.model.context_length * settings.scheduler.max_running,
    )
