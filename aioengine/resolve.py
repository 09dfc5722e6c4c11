"""What the user asked for, and facts about model and machine, become ``Settings``: every "auto" is answered here, once.

Pure: facts come as arguments (``model_folder.read_facts``, ``machine.device_facts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioengine.config import (
    EngineConfig,
    MemorySettings,
    ModelSettings,
    RunnerSettings,
    SchedulerSettings,
    Settings,
    TextSettings,
)

if TYPE_CHECKING:
    from aioengine.machine import DeviceFacts
    from aioengine.model_folder import ModelFacts

RUNNER_FACTORY: Final = "aioengine.runner.model_runner:build"
CPU_CHUNK_TOKENS: Final = 512
CPU_MAX_RUNNING: Final = 64
CPU_MEMORY_FRACTION: Final = 0.4
"""Modest: a laptop's other programs stay in memory."""
THREADED_PARAMETERS: Final = 16_000_000
"""A step of a smaller model (of about so many weights) is made of operations of a few microseconds: to wake a second
thread for each costs more than it does.
"""


def resolve(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> Settings:
    """Answer every None and "auto".

    Raises:
        ValueError: what was asked for does not go with this model or this machine.
    """
    return Settings(
        model=_model_settings(config, model, device),
        memory=_memory_settings(config),
        scheduler=_scheduler_settings(config, model),
        runner=RunnerSettings(
            factory=RUNNER_FACTORY,
            device=_device(config),
            attention_backend="torch" if config.device.attention_backend == "auto" else config.device.attention_backend,
            num_threads=_num_threads(model, device),
        ),
        text=TextSettings(tokenizer_path=_tokenizer_path(config, model)),
        random_seed=device.drawn_seed if config.random_seed is None else config.random_seed,
        log_level=config.log_level,
    )


def context_length(config: EngineConfig, model: ModelFacts) -> int:
    """The context of the requests: the model's, or a smaller one that was asked for."""
    wanted = config.model.context_length
    if wanted is None:
        return model.context_length
    if wanted > model.context_length:
        raise ValueError(
            f"context_length must be at most {model.context_length}, which this model was made for, got {wanted}"
        )
    return wanted


def _num_threads(model: ModelFacts, device: DeviceFacts) -> int:
    parameters = 12 * model.num_layers * model.hidden_size**2 + model.vocab_size * model.hidden_size
    return device.num_threads if parameters >= THREADED_PARAMETERS else 1


def _device(config: EngineConfig) -> str:
    if config.device.name == "cuda":
        raise ValueError("device='cuda' is not available yet; device must be 'cpu' or 'auto'")
    return "cpu"


def _dtype(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> str:
    """On a CPU: bf16 for 16-bit checkpoints where it has the dot products for it, else fp32."""
    if config.model.dtype == "float16":
        raise ValueError("dtype='float16' is not available on a CPU; dtype must be 'auto', 'bfloat16' or 'float32'")
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if device.cpu_bfloat16 and model.dtype != "float32" else "float32"


def _model_settings(config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> ModelSettings:
    if model.missing_weights and config.model.load_format != "dummy":
        raise ValueError(model.missing_weights)
    return ModelSettings(
        path=model.path,
        dtype=_dtype(config, model, device),
        load_format="safetensors" if config.model.load_format == "auto" else config.model.load_format,
        context_length=context_length(config, model),
        vocab_size=model.vocab_size,
        trust_remote_code=config.model.trust_remote_code,
    )


def _memory_settings(config: EngineConfig) -> MemorySettings:
    wanted, page_size = config.memory.max_total_tokens, config.memory.page_size
    if wanted is not None and wanted < page_size:
        raise ValueError(f"max_total_tokens must be at least one page ({page_size} tokens), got {wanted}")
    fraction = config.memory.mem_fraction_static
    return MemorySettings(
        page_size=page_size,
        num_pages=None if wanted is None else wanted // page_size,
        mem_fraction_static=CPU_MEMORY_FRACTION if fraction is None else fraction,
    )


def _scheduler_settings(config: EngineConfig, model: ModelFacts) -> SchedulerSettings:
    """A step must have room for a token of every running request, so the budget is never below ``max_running``.

    On a CPU a launch computes the step before it returns; reading it later would only delay its tokens: depth 0.
    """
    length, wishes = context_length(config, model), config.scheduler
    chunk = CPU_CHUNK_TOKENS if wishes.chunk_tokens is None else wishes.chunk_tokens
    if wishes.chunk_tokens == -1:
        chunk = length
    max_running = min(CPU_MAX_RUNNING, chunk) if wishes.max_running is None else wishes.max_running
    return SchedulerSettings(
        max_running=max_running,
        chunk_tokens=max(chunk, max_running),
        context_length=length,
        policy=wishes.policy,
        prefix_cache=config.memory.prefix_cache,
        depth=0,
    )


def _tokenizer_path(config: EngineConfig, model: ModelFacts) -> str | None:
    if not config.model.tokenizer:
        return None
    if model.tokenizer_path is None:
        raise ValueError(
            f"{model.path!r} has no tokenizer.json; name another folder with tokenizer_path, or pass token ids only "
            "with skip_tokenizer_init=True"
        )
    return model.tokenizer_path
