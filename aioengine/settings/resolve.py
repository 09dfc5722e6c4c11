"""Resolves the values of the user to ``Settings``, without None and "auto".

The facts about model and machine are arguments (``model_folder.find_facts``, ``machine.device_facts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from aioengine.api import checks
from aioengine.model_files import quantized_formats
from aioengine.model_files.adapter_folder import FUSED, AdapterFolder
from aioengine.model_files.model_folder import ModelFacts
from aioengine.model_files.online_quantization import METHODS
from aioengine.settings.config import (
    DEFAULT_GROUP_SIZE,
    EAGLE,
    EAGLE3,
    NGRAM,
    STANDALONE,
    TRANSFORMERS,
    DeviceConfig,
    DraftSettings,
    EngineConfig,
    LoraConfig,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    RankSettings,
    RunnerSettings,
    SchedulerSettings,
    Settings,
    TextSettings,
)
from aioengine.settings.machine import DeviceFacts
from aioengine.settings.memory_model import effective_windows
from aioengine.settings.page_groups import layer_groups

RUNNER_FACTORY: Final = "aioengine.runner.build:build"
PACKED: Final = "packed"
"""The attention backend of models that attend in both directions."""

CPU_LIMITS: Final = 512, 64
"""Default tokens of a step and running requests."""
GPU_LIMITS: Final = 8192, 1024

COMPILE_SHARE: Final = 0.9
"""The part of ``startup_timeout`` in which kernels must compile. Their error is clearer than the start's timeout."""

EMBEDDER_WORK: Final = 3.5e12
"""Parameters times tokens of a step of an embedder that takes an H200 about 15 ms. Shorter steps wait for the host."""
MAX_EMBEDDER_TOKENS: Final = 32_768
GPU_DECODE_COST: Final = 4
"""On an H200, a decoding row with 128 to 1000 positions takes as long as 2 (8 billion parameters) to 6 (0.6 billion)
tokens of a prompt.
"""
SNAPSHOT_TOKENS: Final = 64, 256
"""Snapshots of states are taken at multiples of these numbers of tokens, on a CPU and on a GPU.

After a prefix hit, fewer tokens than this are computed again, which takes a GPU hardly longer than one token. Smaller
numbers would split prompts into too many steps.
"""
GPU_GRAPH_ROWS: Final = 1024
_DRAFT_FOLDERS: Final = {
    STANDALONE: "a small model with the vocabulary of the model",
    EAGLE: "the folder of an EAGLE head that was trained for the model",
    EAGLE3: "the folder of an EAGLE-3 head that was trained for the model",
}
"""Algorithms of speculation with a folder of its own -> the folder."""
DRAFT_TOKENS: Final = 8
"""Default tokens of a row with drafts. On a CPU, up to 8 tokens take little longer than one."""
FUSED_CHUNK: Final = 512
"""attention_backend='fused' processes this many positions at a time, which must be whole pages."""

CPU_MEMORY_FRACTION: Final = 0.4
"""Leaves memory to the other programs of a laptop."""
THREADED_PARAMETERS: Final = 16_000_000
"""Approximate size of the smallest model for which several threads are faster. Operations of smaller models take a few
microseconds, less than waking a thread.
"""

GPU_MEMORY_FRACTION: Final = 0.88


def resolve(
    config: EngineConfig,
    model: ModelFacts,
    device: DeviceFacts,
    adapters: Sequence[AdapterFolder] = (),
    draft: ModelFacts | None = None,
) -> Settings:
    """Replace every None and "auto". ``adapters``: the folders of the adapters in ``config``. ``draft``: the draft
    model in ``config``.

    Raises ValueError if a value does not fit the model or the machine.
    """
    device_name = _device(config, device)
    is_on_gpu = device_name == "cuda"
    if model.implementation == TRANSFORMERS and config.device.batch_invariant and is_on_gpu:
        raise ValueError("enable_deterministic_inference does not work on a GPU for models in transformers' code")
    dtype = _dtype(config, model, device, is_on_gpu=is_on_gpu)
    backend = _attention_backend(config, model, dtype, is_on_gpu=is_on_gpu)
    scheduler = _scheduler_settings(config, model, is_on_gpu=is_on_gpu)
    model_settings = _model_settings(config, model, dtype)
    if model_settings.quantization:
        quantized_formats.check("quantization", model_settings.quantization, device_name)
    ranks = _rank_settings(config, model)
    if is_on_gpu:
        _check_gpus(config.device, config.supervision.num_replicas, device.num_gpus)
    graph_rows = 0
    if is_on_gpu and config.device.cuda_graphs:
        wanted = config.device.cuda_graph_max_rows
        # each token of a row with drafts is a row of a graph
        max_rows = scheduler.max_running * (1 + scheduler.max_drafts)
        graph_rows = min(max_rows, GPU_GRAPH_ROWS if wanted is None else wanted)
    if config.model.tokenizer and model.tokenizer_path is None:
        remedy = "give another folder in tokenizer_path, or use token ids only with skip_tokenizer_init=True"
        raise ValueError(f"{(config.model.tokenizer_path or model.path)!r} has no tokenizer; {remedy}")
    return Settings(
        model=model_settings,
        memory=_memory_settings(config, model, dtype, backend, is_on_gpu=is_on_gpu),
        scheduler=scheduler,
        runner=RunnerSettings(
            factory=RUNNER_FACTORY,
            device=device_name,
            attention_backend=backend,
            fallback_backend="triton" if config.device.attention_backend == "auto" else "",
            num_threads=max(device.num_threads // (config.device.tp_size * config.supervision.num_replicas), 1)
            if _num_parameters(model) >= THREADED_PARAMETERS
            else 1,
            batch_invariant=config.device.batch_invariant,
            cuda_graph_max_rows=graph_rows,
            compile_timeout_s=COMPILE_SHARE * config.supervision.startup_timeout_s,
            logprobs_mode=config.logprobs_mode,
            logits_processors=config.device.logits_processors,
            lora=_lora_settings(config.lora, model, adapters),
            draft=_draft_settings(config, model, draft, dtype, is_on_gpu=is_on_gpu),
            ranks=ranks,
            num_replicas=config.supervision.num_replicas,
            base_gpu_id=config.device.base_gpu_id,
        ),
        text=TextSettings(
            tokenizer_path=model.tokenizer_path if config.model.tokenizer else None,
            allow_request_templates=config.model.allow_request_templates,
            files=model.weights.tokenizer_files,
            eos_token_ids=model.eos_token_ids,
        ),
        random_seed=device.drawn_seed if config.random_seed is None else config.random_seed,
        log_level=config.log_level,
    )


def _check_gpus(config: DeviceConfig, num_replicas: int, num_gpus: int) -> None:
    """Raise ValueError if there are fewer GPUs than ranks of all replicas."""
    last = config.base_gpu_id + num_replicas * config.tp_size
    if last > num_gpus:
        wanted = f"tp_size={config.tp_size}, dp_size={num_replicas} and base_gpu_id={config.base_gpu_id}"
        raise ValueError(f"{wanted} need {checks.counted(last, 'GPU')}, and this machine has {num_gpus}")


def _only_with(needed: str, **values: object) -> None:
    """Raise ValueError for arguments that are not None: they have an effect only with another one."""
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} has an effect only with {needed}")


def _rank_settings(config: EngineConfig, model: ModelFacts) -> RankSettings | None:
    """Return the ranks; None for one rank. Raises ValueError if the model cannot be divided."""
    num_ranks = config.device.tp_size
    if num_ranks == 1:
        return None
    if num_ranks not in model.rank_counts:
        counts = ", ".join(map(str, model.rank_counts))
        raise ValueError(f"tp_size={num_ranks} does not work for this model: {model.rank_sizes}; allowed: {counts}")
    if config.draft_model is not None and config.draft_model.draft_head:
        wanted = f"speculative_algorithm={config.speculation.algorithm!r}"
        raise ValueError(f"tp_size={num_ranks} does not work with {wanted} yet; allowed: 'NGRAM', 'STANDALONE'")
    return RankSettings(size=num_ranks)


def context_length(config: EngineConfig, model: ModelFacts) -> int:
    """Return the context length: the model's, or a smaller one in ``config``.

    Raises ValueError if ``config`` has a larger one.
    """
    wanted = config.model.context_length
    if wanted is None:
        return min(model.context_length, model.pooling.max_tokens or model.context_length)
    if wanted > model.context_length:
        raise ValueError(f"context_length must be at most {model.context_length}, as in this model, got {wanted}")
    return wanted


def _num_parameters(model: ModelFacts) -> int:
    """Estimate the number of parameters."""
    return 12 * model.num_layers * model.hidden_size**2 + model.vocab_size * model.hidden_size


def _device(config: EngineConfig, device: DeviceFacts) -> str:
    if config.device.name == "cuda" and not device.num_gpus:
        raise ValueError("device='cuda' is not available: this machine has no NVIDIA GPU; allowed: 'cpu'")
    if config.device.name != "auto":
        return config.device.name
    return "cuda" if device.num_gpus and device.has_triton else "cpu"


def _attention_backend(config: EngineConfig, model: ModelFacts, dtype: str, *, is_on_gpu: bool) -> str:
    """Return the fastest backend that can compute the model. The runner checks that it works on this machine.

    FlashInfer computes neither latent attention nor float32, and ``fused`` neither latent attention nor soft caps.
    """
    if not model.is_causal:
        return PACKED
    wanted = config.device.attention_backend
    is_invariant = config.device.batch_invariant and is_on_gpu
    if wanted in {"flashinfer", "triton"} and not is_on_gpu:
        raise ValueError(f"attention_backend={wanted!r} needs an NVIDIA GPU, and this engine would run on the CPU")
    if wanted == "fused" and is_on_gpu:
        raise ValueError(f"attention_backend={wanted!r} is for the CPU, and this engine would run on a GPU")
    if wanted in {"flashinfer", "torch"} and is_invariant:
        deterministic = "enable_deterministic_inference on a GPU"
        raise ValueError(f"attention_backend={wanted!r} does not work with {deterministic}; allowed: 'auto', 'triton'")
    if wanted == "flashinfer" and model.is_latent:
        raise ValueError("attention_backend='flashinfer' has no latent attention; allowed: 'triton', 'torch', 'auto'")
    if is_on_gpu and wanted == "auto":
        return "triton" if dtype == "float32" or is_invariant or model.is_latent else "flashinfer"
    if wanted in {"auto", "fused"}:
        return "torch" if model.is_latent or model.has_soft_cap else "fused"
    return wanted


def _dtype(config: EngineConfig, model: ModelFacts, device: DeviceFacts, *, is_on_gpu: bool) -> str:
    """Return the dtype of the computation.

    "auto" on a GPU is 16 bits. A float32 checkpoint becomes float16 if the model is an encoder, else bfloat16: the
    activations of some decoders leave the range of float16. "auto" on a CPU is bfloat16 for a 16-bit checkpoint if the
    CPU has bf16 dot products, else float32.
    """
    if config.model.dtype == "float16" and not is_on_gpu:
        raise ValueError("dtype='float16' is not available on a CPU; dtype must be 'auto', 'bfloat16' or 'float32'")
    if config.model.dtype != "auto":
        return config.model.dtype
    if is_on_gpu:
        half = "float16" if model.is_encoder else "bfloat16"
        return half if model.dtype == "float32" else model.dtype
    return "bfloat16" if device.cpu_bfloat16 and model.dtype != "float32" else "float32"


def _model_settings(config: EngineConfig, model: ModelFacts, dtype: str) -> ModelSettings:
    if model.weights.missing and config.model.load_format != "dummy":
        raise ValueError(model.weights.missing)
    stored = "gguf" if model.path.endswith(".gguf") else "safetensors"
    wanted = stored if config.model.load_format == "auto" else config.model.load_format
    if wanted not in {stored, "dummy"}:
        kind = "is a GGUF file" if stored == "gguf" else "is no GGUF file"
        raise ValueError(f"load_format={wanted!r}, but {model.path!r} {kind}; allowed: 'auto'")
    wanted_method = config.model.quantization
    quantization = wanted_method if wanted_method in METHODS and not model.is_quantized else ""
    group_size = config.model.quantization_group_size
    if quantization != "int4":
        _only_with("quantization='int4'", quantization_group_size=group_size)
    return ModelSettings(
        path=model.path,
        dtype=dtype,
        checkpoint_dtype=model.dtype,
        load_format=wanted,
        context_length=context_length(config, model),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        task=model.task,
        pooling=model.pooling,
        files=model.weights.files,
        trust_remote_code=config.model.trust_remote_code,
        implementation=model.implementation,
        sampling_defaults=model.sampling_defaults,
        quantization=quantization,
        draft_head=config.model.draft_head,
        quantization_group_size=group_size or DEFAULT_GROUP_SIZE,
    )


def _kv_dtype(config: EngineConfig, model: ModelFacts, dtype: str, backend: str, *, is_on_gpu: bool) -> str | None:
    """Return the dtype of the KV cache; None: the dtype of the model."""
    wanted = config.memory.kv_cache_dtype
    if wanted in {"auto", dtype}:
        return None
    if not model.is_causal:
        raise ValueError(f"kv_cache_dtype={wanted!r}: this model has no KV cache; allowed: 'auto'")
    quantized_formats.check("kv_cache_dtype", wanted, "cuda" if is_on_gpu else "cpu")
    if is_on_gpu and model.is_latent and backend != "torch":
        raise ValueError(f"kv_cache_dtype={wanted!r} does not work on a GPU with latent attention; allowed: 'auto'")
    return wanted


def _memory_settings(
    config: EngineConfig, model: ModelFacts, dtype: str, backend: str, *, is_on_gpu: bool
) -> MemorySettings:
    wanted, page_size = config.memory.max_total_tokens, config.memory.page_size
    if backend == "fused" and FUSED_CHUNK % page_size:
        limit = f"page_size must be a power of two from 1 to {FUSED_CHUNK} with attention_backend='fused'"
        raise ValueError(f"{limit}, got {page_size}; attention_backend='torch' works with 1 to 1024")
    if wanted is not None and wanted < page_size:
        raise ValueError(f"max_total_tokens must be at least one page ({page_size} tokens), got {wanted}")
    default = GPU_MEMORY_FRACTION if is_on_gpu else CPU_MEMORY_FRACTION
    fraction = config.memory.mem_fraction_static
    return MemorySettings(
        page_size=page_size,
        num_pages=None if wanted is None else wanted // page_size,
        mem_fraction_static=default if fraction is None else fraction,
        kv_dtype=_kv_dtype(config, model, dtype, backend, is_on_gpu=is_on_gpu),
        can_release=config.memory.can_release,
    )


def _scheduler_settings(config: EngineConfig, model: ModelFacts, *, is_on_gpu: bool) -> SchedulerSettings:
    """Return the limits of steps. The token budget is at least ``max_running``, one token per request.

    On a CPU, ``depth`` is 0: launching a step computes it, so overlap would only delay its tokens.
    """
    length, wanted, page_size = context_length(config, model), config.scheduler, config.memory.page_size
    default_chunk, default_running = GPU_LIMITS if is_on_gpu else CPU_LIMITS
    if is_on_gpu and model.task != "generate":
        num_tokens = int(EMBEDDER_WORK / _num_parameters(model)) // 1024 * 1024
        default_chunk = min(max(num_tokens, default_chunk), MAX_EMBEDDER_TOKENS)
    chunk = default_chunk if wanted.chunk_tokens is None else wanted.chunk_tokens
    if wanted.chunk_tokens == -1:
        chunk = length
    splits_prompts = model.is_causal and (model.task == "generate" or model.pooling.kind == "last")
    max_running = min(default_running, chunk) if wanted.max_running is None else wanted.max_running
    return SchedulerSettings(
        max_running=max_running,
        chunk_tokens=max(chunk, max_running),
        context_length=length,
        policy=wanted.policy,
        prefix_cache=config.memory.prefix_cache and splits_prompts,
        splits_prompts=splits_prompts,
        whole_image_tokens=model.whole_image_tokens,
        short_length=model.short_length if length > model.short_length else 0,
        depth=1 if is_on_gpu and wanted.overlap else 0,
        tenant_weights=wanted.tenant_weights,
        decode_cost=GPU_DECODE_COST if is_on_gpu else 1,
        max_drafts=_max_drafts(config, model),
        has_ngrams=config.speculation.algorithm == NGRAM,
        snapshot_tokens=-(-SNAPSHOT_TOKENS[is_on_gpu] // page_size) * page_size if model.keeps_states else 0,
    )


def _max_drafts(config: EngineConfig, model: ModelFacts) -> int:
    """Return the maximum number of drafts of a row; 0: no speculation."""
    wanted = config.speculation
    num_steps, num_tokens = wanted.num_steps, wanted.num_draft_tokens
    if not wanted.algorithm:
        _only_with("speculative_algorithm", speculative_num_steps=num_steps, speculative_num_draft_tokens=num_tokens)
        return 0
    if num_steps is not None and num_tokens is not None and num_tokens != num_steps + 1:
        steps = f"speculative_num_steps + 1 = {num_steps + 1}"
        raise ValueError(f"speculative_num_draft_tokens={num_tokens} must be {steps}; leave out one of them")
    if why := _why_undraftable(model):
        raise ValueError(f"speculative_algorithm={wanted.algorithm!r} does not work for {model.model_type}: {why}")
    if num_steps is not None:
        return num_steps
    return DRAFT_TOKENS - 1 if num_tokens is None else num_tokens - 1


def _why_undraftable(model: ModelFacts) -> str:
    """Return why a model can neither verify nor propose drafts; "" if it can."""
    if model.task != "generate" or not model.is_causal:
        return "it does not generate text"
    if model.keeps_states:
        return "its recurrent layers keep a state that cannot be taken back when a draft is rejected"
    return ""


def _draft_settings(
    config: EngineConfig, model: ModelFacts, draft: ModelFacts | None, dtype: str, *, is_on_gpu: bool
) -> DraftSettings | None:
    """Return the settings of the draft model ``draft``; None: there is none.

    Raises ValueError if there must be one, or if it cannot propose drafts.
    """
    wanted, draft_config = config.speculation, config.draft_model
    algorithm = wanted.algorithm
    folder = _DRAFT_FOLDERS.get(algorithm)
    if folder is None:
        algorithms = "speculative_algorithm='STANDALONE', 'EAGLE' or 'EAGLE3'"
        _only_with(algorithms, speculative_draft_model_path=wanted.draft_model_path)
    elif wanted.draft_model_path is None:
        raise ValueError(f"speculative_algorithm={algorithm!r} needs speculative_draft_model_path: {folder}")
    if wanted.draft_model_path is None:
        _only_with(
            "speculative_draft_model_path",
            speculative_draft_model_revision=wanted.draft_revision,
            speculative_draft_model_quantization=wanted.draft_quantization,
        )
    if draft is None or draft_config is None:
        return None
    length = context_length(config, model)
    read_layers: tuple[int, ...] = ()
    if draft_config.draft_head:
        read_layers = _read_layers(algorithm, model, draft)
        draft = replace(draft, context_length=length)  # drafts beyond the trained length may still be accepted
    if why := _why_undraftable(draft):
        path = f"speculative_draft_model_path={wanted.draft_model_path!r}"
        raise ValueError(f"{path} cannot be a draft model ({draft.model_type}): {why}")
    # The draft model reads the page table of the layers with the largest window. Within this window, no page is freed.
    # It computes no position with long RoPE factors.
    windows = layer_groups(effective_windows(model.windows, length))[1]
    limits = length, draft.context_length, draft.short_length, windows[0] if windows else None
    draft_config = replace(draft_config, context_length=min(limit for limit in limits if limit))
    own = replace(config, model=draft_config)
    settings = _model_settings(own, draft, dtype)
    if settings.quantization:
        device = "cuda" if is_on_gpu else "cpu"
        quantized_formats.check(
            "quantization", settings.quantization, device, argument="speculative_draft_model_quantization"
        )
    backend = _attention_backend(own, draft, dtype, is_on_gpu=is_on_gpu)
    _kv_dtype(own, draft, dtype, backend, is_on_gpu=is_on_gpu)  # checks that the draft model can use it, too
    return DraftSettings(model=settings, attention_backend=backend, read_layers=read_layers)


def _read_layers(algorithm: str, model: ModelFacts, head: ModelFacts) -> tuple[int, ...]:
    """Return the layers of the model whose inputs a draft head reads; see ``Features.layers``.

    Raises ValueError if the head does not fit the model.
    """
    shown, num_layers = f"the draft head {head.path!r}", model.num_layers
    if model.implementation == TRANSFORMERS:
        others = "NGRAM and STANDALONE work"
        raise ValueError(f"speculative_algorithm={algorithm!r} does not work with transformers' code; {others}")
    if head.hidden_size != model.hidden_size:
        sizes = f"hidden_size {head.hidden_size}, and the model has {model.hidden_size}"
        raise ValueError(f"{shown} has {sizes}; a head works only with the model for which it was trained")
    if algorithm != EAGLE3:
        return (num_layers,)
    layers = head.read_layers or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(f"{shown} reads layers {', '.join(map(str, layers))}, and the model has {num_layers} layers")
    return layers


def _lora_settings(wanted: LoraConfig, model: ModelFacts, adapters: Sequence[AdapterFolder]) -> LoraSettings | None:
    if wanted.enabled is False and wanted.adapters:
        raise ValueError("lora_paths is set, but enable_lora=False; leave out one of them")
    if not (wanted.enabled or wanted.adapters):
        return None
    if not model.is_causal:
        raise ValueError("enable_lora does not work for this model, whose tokens attend in both directions")
    if not adapters and (wanted.max_rank is None or wanted.modules is None):
        needed = "max_lora_rank (such as 16) and lora_target_modules (such as ['q_proj', 'v_proj'], or 'all')"
        raise ValueError(f"enable_lora=True without lora_paths needs {needed}")
    num_slots, num_pinned = wanted.num_slots, sum(adapter.is_pinned for adapter in wanted.adapters)
    if num_pinned >= num_slots:
        pinned = checks.counted(num_pinned, "pinned adapter")
        more = f"max_loras_per_batch={num_slots} must be larger"
        raise ValueError(f"lora_paths has {pinned}; {more}, because other adapters need at least one slot")
    if wanted.max_loaded is not None and wanted.max_loaded < num_slots:
        raise ValueError(f"max_loaded_loras must be at least max_loras_per_batch={num_slots}, got {wanted.max_loaded}")
    ranks = [part.rank for folder in adapters for part in folder.stored_parts]
    return LoraSettings(
        num_slots=num_slots,
        max_rank=max(ranks) if wanted.max_rank is None else wanted.max_rank,
        modules=_lora_modules(wanted, model, adapters),
        max_loaded=wanted.max_loaded,
    )


def _lora_modules(wanted: LoraConfig, model: ModelFacts, adapters: Sequence[AdapterFolder]) -> tuple[str, ...]:
    """Return the modules that adapters may change; () for all modules of the model."""
    if wanted.modules is None:
        parts = [part for folder in adapters for part in folder.parts(model.linear_layers)]
        return tuple(sorted({part.module for part in parts}))
    known = {name.rpartition(".")[2] for name in model.linear_layers}
    modules = tuple(own for module in wanted.modules for own in FUSED.get(module, (module,)))
    if unknown := next((module for module in modules if module not in known), None):
        there = f"it has {', '.join(sorted(known))}"
        raise ValueError(f"lora_target_modules has {checks.shown(unknown)}, which this model does not have; {there}")
    return modules
