"""Build the runner from the settings: the model with its weights, attention, the KV pool, CUDA graphs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import Tensor

from aioengine import models, plugins
from aioengine.attention import _image_attention, _mixed, fused
from aioengine.attention._base import AttentionBackend, AttentionShape, BackendUnavailableError
from aioengine.families._config import Task, as_embedder
from aioengine.families._draft_heads import read_draft_head
from aioengine.kernels import token_logprobs
from aioengine.kernels.codes import FP8
from aioengine.kernels.triton.launcher import compiled_in_threads
from aioengine.kernels.vector_functions import prepare_vector_functions
from aioengine.layers.layer import WHOLE, Shard
from aioengine.layers.ranks import RankGroup
from aioengine.model_files.checkpoint import check_unchanged
from aioengine.model_files.gguf_quantization import StoredTypes
from aioengine.model_files.online_quantization import OnlineQuantization
from aioengine.model_files.quantization import read_config, split_config
from aioengine.model_files.vocabulary import sampled_vocab_size
from aioengine.models._base import Model, ModelOptions
from aioengine.models._draft_head import DraftHead
from aioengine.models._features import Features
from aioengine.protocol.messages import Fact, Progress
from aioengine.quantization.gguf import gguf_formats
from aioengine.quantization.online import online_formats
from aioengine.quantization.stored import formats
from aioengine.runner import weights
from aioengine.runner.device_memory import DeviceMemory, fit_pool, kv_cache_of
from aioengine.runner.kv_pool import FIRST_PAGE, KVPool
from aioengine.runner.lora.pool import AdapterPool, slots_bytes
from aioengine.runner.model_runner import DeviceParts, ModelRunner
from aioengine.runner.speculation.draft_model import DraftParts
from aioengine.runner.state_pool import StatePool
from aioengine.runner.timing import StartTimes
from aioengine.runner.warmup import capture_graphs, warm_up_device
from aioengine.runner.weight_loading import WeightLoader
from aioengine.settings.config import TRANSFORMERS, DraftSettings, RunnerSettings, Settings
from aioengine.settings.memory_model import KVCache, PoolDemand, PoolFit

if TYPE_CHECKING:
    from aioengine.models._fallback import TransformersFolder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = DTYPES | {"fp8_e4m3": FP8, "int8": torch.int8}

_POOL_ADVICE = "Lower mem_fraction_static or max_total_tokens"
_ADAPTERS_ADVICE = "Lower max_lora_rank or max_loras_per_batch"
_GRAPHS_ADVICE = "Lower mem_fraction_static or cuda_graph_max_bs, or set disable_cuda_graph=True"


def build(settings: Settings, report: Callable[[Progress], None]) -> ModelRunner:
    """Return a runner that is ready for requests: load the model, allocate the pools, capture CUDA graphs.

    Sets torch's number of threads, so it should run in a separate process.

    Raises:
        ValueError: the model, its weights, the device or the dtype cannot be used, or memory is short. The message says
            what works.
    """
    device = torch.device(settings.runner.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {settings.runner.device!r} is not available: torch finds no GPU; device='cpu' works")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError("device='cuda' needs the package triton, which torch's CUDA wheels install")
    with compiled_in_threads(device):
        return _build(settings, device, report)


def _build(settings: Settings, device: torch.device, report: Callable[[Progress], None]) -> ModelRunner:
    times = StartTimes()
    torch.set_num_threads(settings.runner.num_threads)
    prepare_vector_functions()
    vocab_size = sampled_vocab_size(settings)
    check_unchanged(settings.model.files)
    shard = _shard(settings, device)
    memory = DeviceMemory(device, shard.group)
    source = _ModelSource.of(settings, shard)
    loaded = _load(source, vocab_size, memory, times, report)
    model, draft = loaded.model, loaded.draft
    times.end("weights")
    adapters = _allocate_adapters(model, settings, memory, shard.group)
    state_bytes = 0 if model.state_shape is None else model.state_shape.num_bytes
    draft_cache, draft_model = (None, None) if draft is None else (draft.kv_cache, draft.model)
    demand = PoolDemand.of(settings, loaded.kv_cache, state_bytes=state_bytes, draft=draft_cache)
    pool = fit_pool(demand, memory.pool_budget(model, settings, adapters, draft_model))
    if shard.group is not None:
        pool = PoolFit(*(shard.group.all_reduce_min(number) for number in pool))
    if state_bytes:  # each running request needs memory for its states
        graph_rows = min(settings.runner.cuda_graph_max_rows, pool.num_rows)
        scheduler = replace(settings.scheduler, max_running=pool.num_rows)
        runner_settings = replace(settings.runner, cuda_graph_max_rows=graph_rows)
        settings = replace(settings, scheduler=scheduler, runner=runner_settings)
    times.end("largest_step")
    with memory.record("the KV pool and attention's workspace", advice=_POOL_ADVICE):
        parts = _allocate(settings, loaded, pool, adapters, vocab_size)
    times.end("kv_pool")
    facts = _facts(parts, loaded) | {"max_total_tokens": demand.tokens_in(pool.num_pages)}
    with memory.record("CUDA graphs", advice=_GRAPHS_ADVICE):
        runner = ModelRunner(parts, facts)
        if device.type == "cuda":
            warm_up_device(runner, parts, report=report, times=times)
    loader = WeightLoader(
        model,
        settings,
        runner.facts,
        make_empty=source.without_memory().build,
        runner=runner,
        capture_graphs=lambda: capture_graphs(runner, parts, report),
        ranks=shard.group,
    )
    runner.controls |= loader.controls
    runner.facts |= memory.facts() | times.facts()
    return runner


def _shard(settings: Settings, device: torch.device) -> Shard:
    """Return the shard of this process. Connect to the other ranks if there are any."""
    ranks = settings.runner.ranks
    if ranks is None:
        return WHOLE
    is_invariant = device.type == "cpu" or settings.runner.batch_invariant
    group = RankGroup(ranks.rank, ranks.size, store_file=ranks.store_file, device=device, batch_invariant=is_invariant)
    return Shard(ranks.rank, ranks.size, group)


@dataclass(frozen=True, slots=True)
class _ModelSource:
    """Builds a model, and loads its weights.

    Attributes:
        config: config.json without its quantization.
        widened: the quantized types of a GGUF file that are dequantized while they are loaded.
    """

    settings: Settings
    config: Mapping[str, object]
    options: ModelOptions
    widened: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings, shard: Shard) -> _ModelSource:
        """Read config.json, and choose the weight formats."""
        options = ModelOptions(
            dtype=DTYPES[settings.model.dtype],
            device=torch.device(settings.runner.device),
            max_positions=settings.model.context_length,
            batch_invariant=settings.runner.batch_invariant,
            shard=shard,
        )
        folder = Path(settings.model.path)
        config = read_config(folder)
        if config is None:
            raise ValueError(f"{folder} has no config.json, which a model folder must have")
        if settings.model.task == Task.EMBED:
            config = as_embedder(config)
        config, quantization = split_config(config)
        widened: tuple[str, ...] = ()
        if quantization is not None:
            has_kv_scales = quantization.has_kv_scales and settings.memory.kv_dtype == "fp8_e4m3"
            options = dataclasses.replace(options, format_of=formats(quantization), has_kv_scales=has_kv_scales)
        elif settings.model.load_format == "gguf":
            stored = StoredTypes.of(folder, is_on_cpu=options.device.type == "cpu")
            format_of, table_format = gguf_formats(stored)
            options = dataclasses.replace(options, format_of=format_of, table_format=table_format, mixes_formats=True)
            widened = stored.widened
        elif (online := OnlineQuantization.of(settings.model)) is not None:
            format_of, table_format = online_formats(online)
            options = dataclasses.replace(options, format_of=format_of, table_format=table_format)
        return cls(settings, config, options, widened)

    def build(self) -> Model:
        """Build the model without loading its weights."""
        model = self.settings.model
        if model.implementation == TRANSFORMERS:
            return self._fallback().load(self.options)
        if model.draft_head:
            return DraftHead(read_draft_head(self.config, model.draft_head), self.options)
        return models.build(self.config, self.options)

    def without_memory(self) -> _ModelSource:
        """Return the source of a model whose weights have no memory."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, device=torch.device("meta")))

    def weights_bytes(self) -> int:
        """Return the bytes of the parameters without loading them."""
        if self.settings.model.implementation == TRANSFORMERS:
            return self._fallback().num_bytes(self.without_memory().options)
        return sum(target.num_bytes for target in self.without_memory().build().weights().values())

    def load(self, model: Model, purpose: str, times: StartTimes, report: Callable[[Progress], None]) -> _LoadedModel:
        """Choose attention, and load the weights. purpose: for the progress bar."""
        dtype, device, newest = self.options.dtype, self.options.device, self.settings.model.weights
        shape = dataclasses.replace(model.attention_shape, dtype=dtype)
        choice = choose_attention(self.settings.runner, shape, dtype, device, kv_dtype=self.kv_dtype, report=report)
        times.end("attention")
        weights_bytes = weights.load_newest(
            model, self.settings, newest, lambda done, total: report(Progress(purpose, done, total, "B"))
        )
        return _LoadedModel(self, model, shape, choice, weights_bytes)

    @property
    def kv_dtype(self) -> torch.dtype:
        return KV_DTYPES[self.settings.memory.kv_dtype or self.settings.model.dtype]

    def _fallback(self) -> TransformersFolder:
        """Return the model that transformers computes. Imports transformers here, because that takes a second."""
        from aioengine.models._fallback import TransformersFolder

        model, has_weights = self.settings.model, self.settings.model.load_format != "dummy"
        task, trusts = Task(model.task), model.trust_remote_code
        return TransformersFolder(Path(model.path), task, trust_remote_code=trusts, has_weights=has_weights)


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """A model with its weights, before the sizes of the pools are known.

    Attributes:
        shape: of attention, with the dtype of queries.
        features: of a draft head, else None.
        draft: the draft model; None: there is none.
    """

    source: _ModelSource
    model: Model
    shape: AttentionShape
    choice: AttentionChoice
    weights_bytes: int
    features: Features | None = None
    draft: _LoadedModel | None = None

    @property
    def kv_cache(self) -> KVCache:
        """The sizes of its KV cache."""
        return replace(kv_cache_of(self.shape), feature_size=self.model.hidden_size if self.features else 0)

    def allocate(self, num_pages: int, *, has_page_groups: bool = True) -> tuple[KVPool, AttentionBackend]:
        """Allocate the memory of keys and values, and build attention."""
        settings = self.source.settings
        kv_pool = KVPool(
            self.shape,
            num_pages=num_pages,
            page_size=settings.memory.page_size,
            dtype=self.source.kv_dtype,
            device=self.source.options.device,
            can_resume=settings.memory.can_release and settings.runner.device == "cuda",
            has_page_groups=has_page_groups,
        )
        return kv_pool, self.choice.build(self.shape, kv_pool.tensors)


def _load(
    source: _ModelSource, vocab_size: int, memory: DeviceMemory, times: StartTimes, report: Callable[[Progress], None]
) -> _LoadedModel:
    """Load the model, and the draft model if there is one."""
    settings, options = source.settings, source.options
    place = "machine" if options.device.type == "cpu" else "GPU"
    advice = f"End other processes on this {place}, or use a smaller model, quantization='int4' or a larger {place}"
    if options.dtype == torch.float32:
        advice += "; dtype='bfloat16' needs half"
    with memory.record("the weights", advice=advice, need=source.weights_bytes), torch.no_grad():
        model = source.build()
        memory.check_free(model, advice=advice)
        if (group := options.shard.group) is not None:
            group.open_inboxes(
                settings.scheduler.max_step_tokens,
                model.hidden_size,
                options.dtype,
                max_sampled_rows=settings.runner.cuda_graph_max_rows,
                num_embeddings=model.vocab_size,
            )
        if options.device.type == "cuda" and model.task is Task.GENERATE:
            _compile_sampling(model, vocab_size, settings.runner.logprobs_mode, options.shard.size)
        times.end("device")
        loaded = source.load(model, "loading weights", times, report)
    if settings.runner.draft is None or options.shard.rank:
        return loaded
    with memory.record("the weights of the draft model", advice=advice), torch.no_grad():
        return dataclasses.replace(loaded, draft=_load_draft(settings, settings.runner.draft, model, report))


def _load_draft(
    settings: Settings, draft: DraftSettings, target: Model, report: Callable[[Progress], None]
) -> _LoadedModel:
    """Load a draft model. target: the model, which keeps its hidden states for a draft head."""
    settings = replace(
        settings,
        model=draft.model,
        memory=replace(settings.memory, kv_dtype=settings.memory.kv_dtype or settings.model.dtype),
        runner=replace(settings.runner, attention_backend=draft.attention_backend),
    )
    check_unchanged(draft.model.files)
    source = _ModelSource.of(settings, WHOLE)
    model = source.build()
    loaded = source.load(model, "loading the draft model", StartTimes(), report)
    if not isinstance(model, DraftHead):
        return loaded
    model.target = target
    target.features = Features(draft.read_layers, model.reduce)
    return dataclasses.replace(loaded, features=target.features)


def _compile_sampling(model: Model, vocab_size: int, logprobs_mode: str, num_ranks: int) -> None:
    """Compile the sampling kernels, which take the longest, while FlashInfer is imported and weights are read."""
    from aioengine.runner.sampling import device_sampler  # imports Triton

    width, device = model.vocab_size, torch.device("cuda")
    vocab_size = min(vocab_size, width)
    sizes = {"vocab_size": vocab_size, "num_embeddings": width, "num_ranks": num_ranks}
    device_sampler.compile_kernels(**sizes, dtype=model.dtype, device=device)
    token_logprobs.compile_kernels(width, model.dtype, device)
    if logprobs_mode == "processed":
        token_logprobs.compile_kernels(vocab_size, torch.float32, device)


def _allocate_adapters(
    model: Model, settings: Settings, memory: DeviceMemory, ranks: RankGroup | None
) -> AdapterPool | None:
    """Allocate the adapter slots. None: LoRA is not enabled.

    Raises:
        ValueError: memory is short.
    """
    lora, dtype = settings.runner.lora, DTYPES[settings.model.dtype]
    if lora is None:
        return None
    need = partial(slots_bytes, model.linears(), lora, dtype)
    with memory.record("the LoRA adapter slots", advice=_ADAPTERS_ADVICE, need=need):
        return AdapterPool(
            model.linears(),
            lora,
            dtype=dtype,
            device=memory.device,
            batch_invariant=settings.runner.batch_invariant,
            ranks=ranks,
        )


def _allocate(
    settings: Settings, loaded: _LoadedModel, pool: PoolFit, adapters: AdapterPool | None, vocab_size: int
) -> DeviceParts:
    """Allocate the pools, and build attention. vocab_size: token ids below this may be sampled."""
    model, device, draft = loaded.model, loaded.source.options.device, None
    kv_pool, attention = loaded.allocate(pool.num_pages)
    states = None
    if model.state_shape is not None:
        states = StatePool(model.state_shape, max_rows=pool.num_rows, device=device, num_snapshots=pool.num_snapshots)
    if loaded.draft is not None:
        draft = _draft_parts(settings, loaded.draft, pool.num_pages)
    return DeviceParts(
        settings=settings,
        model=model,
        attention=attention,
        kv_pool=kv_pool,
        vocab_size=vocab_size,
        device=device,
        adapters=adapters,
        states=states,
        ranks=loaded.source.options.shard.group,
        draft=draft,
        workspace=loaded.choice.workspace(kv_pool.tensors[0].device),
    )


def _draft_parts(settings: Settings, draft: _LoadedModel, num_pages: int) -> DraftParts:
    """Allocate the KV pool of a draft model, and the memory of the features."""
    options = draft.source.options
    if draft.features is not None:
        size = (FIRST_PAGE + num_pages) * settings.memory.page_size, draft.model.hidden_size
        draft.features.pool = torch.zeros(size, dtype=draft.model.dtype, device=options.device)
    kv_pool, attention = draft.allocate(num_pages, has_page_groups=False)
    return DraftParts(
        draft.model,
        attention,
        kv_pool,
        max_length=options.max_positions,
        max_tokens=settings.scheduler.max_step_tokens,
        features=draft.features,
    )


def _facts(parts: DeviceParts, loaded: _LoadedModel) -> dict[str, Fact]:
    """Return what the runner reports about itself."""
    settings, draft = parts.settings, loaded.draft
    facts: dict[str, Fact] = {
        "dtype": settings.model.dtype,
        "device": str(parts.device),
        "attention_backend": loaded.choice.name,
        "kv_cache_dtype": settings.memory.kv_dtype or settings.model.dtype,
        "num_threads": torch.get_num_threads(),
        "weights_bytes": loaded.weights_bytes + (0 if draft is None else draft.weights_bytes),
        **parts.kv_pool.facts,
    }
    if parts.draft is not None:
        facts["kv_pool_bytes"] = parts.kv_pool.num_bytes + parts.draft.num_bytes
    if parts.states is not None:
        facts |= parts.states.facts
    if parts.adapters is not None:
        facts["adapters_bytes"] = parts.adapters.num_bytes
    if loaded.source.widened:
        facts["widened_types"] = ", ".join(loaded.source.widened)
    if loaded.choice.warning:
        facts["warning"] = loaded.choice.warning
    for package in ("torch", "triton", "flashinfer-python"):
        with suppress(metadata.PackageNotFoundError):
            facts[f"{package.removesuffix('-python')}_version"] = metadata.version(package)
    return facts


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention backend of a model.

    name: the backend. warning: why it is not the backend of the settings; empty if it is.
    """

    name: str
    warning: str = ""

    def build(self, shape: AttentionShape, kv_pools: list[Tensor]) -> AttentionBackend:
        """Build the backend for the pools [L, 1 or 2, N, K, S, E] of ``AttentionShape.groups``."""
        backend = _mixed.build(plugins.load("attention", self.name), shape, kv_pools)
        return _image_attention.build(backend, shape, kv_pools) if shape.has_bidirectional_images else backend

    def workspace(self, device: torch.device) -> Tensor | None:
        """Return the workspace [bytes] of the backends on a device; None: they have none."""
        if self.name != "flashinfer":
            return None
        workspace: Tensor | None = importlib.import_module("aioengine.attention._flashinfer").workspace_on(device)
        return workspace


def choose_attention(
    settings: RunnerSettings,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype,
    report: Callable[[Progress], None],
) -> AttentionChoice:
    """Choose the backend that works for queries of ``dtype`` and a KV cache of ``kv_dtype``.

    Raises:
        ValueError: the backend does not work and there is no fallback.
        CompilationTimeoutError: its kernels did not compile in time.
    """
    name = settings.attention_backend
    if not shape.is_causal:
        return AttentionChoice("packed")
    if name == "fused" and (kv_dtype not in {dtype, torch.int8} or not fused.supports(shape, dtype, device)):
        return AttentionChoice("torch")
    if name != "flashinfer":
        return AttentionChoice(name)
    try:
        kernels = _import_flashinfer()
        kernels.make_ready(
            shape,
            dtype,
            device,
            kv_dtype=kv_dtype,
            timeout_s=settings.compile_timeout_s,
            waits=not settings.fallback_backend,
            report=report,
        )
    except BackendUnavailableError as error:
        if not settings.fallback_backend:
            raise ValueError(f"attention_backend='flashinfer' does not work here: {error}") from error
        warning = f"attention uses {settings.fallback_backend}, which is slower than FlashInfer, because {error}"
        return AttentionChoice(settings.fallback_backend, warning)
    return AttentionChoice(name)


def _import_flashinfer() -> ModuleType:
    """Import FlashInfer, and return the module that compiles its kernels and runs them once.

    Raises:
        BackendUnavailableError: this failed.
    """
    try:
        return importlib.import_module("aioengine.attention._flashinfer_ready")
    except ModuleNotFoundError as error:
        message = f"the package {error.name!r} is not installed; pip install 'aioengine[cuda]' installs FlashInfer"
        raise BackendUnavailableError(message) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(f"FlashInfer cannot be imported: {type(error).__name__}: {error}") from error
