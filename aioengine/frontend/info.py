"""Reports of an engine: health, counters, settings, the model. Plain data that can be serialized as JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypedDict, cast

import msgspec
from msgspec.structs import asdict

from aioengine.api.params import FROM_MODEL
from aioengine.protocol.messages import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioengine.frontend.intake.image_prompts import PromptImages
    from aioengine.settings.config import LoadedWeights, Settings
    from aioengine.supervision.incarnation import ProcessState

__version__: Final = "0.1.0"


class ProcessHealth(TypedDict):
    """One process of the engine. Times are seconds since its last heartbeat and its last finished step."""

    role: str
    pid: int
    alive: bool
    last_heartbeat_s: float | None
    last_step_s: float | None


class Health(TypedDict):
    """``state``: "starting", "running", "draining", "stalled", "recovering", "dead" or "closed".

    An engine that was not started yet is "starting"; one that was shut down, or could not start, is "closed".
    """

    state: str
    processes: list[ProcessHealth]


class ModelInfo(TypedDict):
    """The served model.

    Attributes:
        implementation: whose code computes it, "aioengine" or "transformers".
        sampling_defaults: values of sampling parameters that a request leaves out.
    """

    model_path: str
    tokenizer_path: str | None
    is_generation: bool
    weight_version: str
    load_format: str
    dtype: str
    context_length: int
    vocab_size: int
    implementation: str
    sampling_defaults: dict[str, float]


def health(state: str, processes: Iterable[ProcessState]) -> Health:
    """Return the state of the engine and of its processes."""
    return {"state": state, "processes": [cast("ProcessHealth", asdict(process)) for process in processes]}


def child_pids(processes: Iterable[ProcessState], images: PromptImages | None) -> list[int]:
    """Return the ids of live children, including the process that prepares images."""
    pids = [process.pid for process in processes if process.alive and process.pid != os.getpid()]
    child = None if images is None else images.intake.process.child
    return [*pids, child.pid] if child is not None and child.is_alive else pids


def model_info(settings: Settings, weights: LoadedWeights) -> ModelInfo:
    """Return the result of ``get_model_info``."""
    defaults = asdict(Sampling(0)) | settings.model.sampling_defaults
    return {
        "model_path": weights.path or settings.model.path,
        "tokenizer_path": settings.text.tokenizer_path,
        "is_generation": settings.model.task == "generate",
        "weight_version": weights.version,
        "load_format": settings.model.load_format,
        "dtype": settings.model.dtype,
        "context_length": settings.model.context_length,
        "vocab_size": settings.model.vocab_size,
        "implementation": settings.model.implementation,
        "sampling_defaults": {name: defaults[name] for name in FROM_MODEL},
    }


def settings_info(settings: Settings, facts: Mapping[str, object], max_total_tokens: int) -> dict[str, object]:
    """Return the settings and ``facts``, which the scheduler process sent when it was ready."""
    names = ("device", "device_name", "dtype", "attention_backend", "kv_cache_dtype", "num_threads")
    sizes = ("weights", "kv_pool", "adapters", "graphs", "free", "total")
    packages = ("torch", "triton", "flashinfer")
    return {
        "version": __version__,
        **{name: facts[name] for name in names if name in facts},
        "cuda_graph_sizes": [int(size) for size in str(facts.get("cuda_graph_sizes", "")).split()],
        "memory": {f"{name}_bytes": facts[f"{name}_bytes"] for name in sizes if f"{name}_bytes" in facts},
        "start": {name.removeprefix("start_"): value for name, value in facts.items() if name.startswith("start_")},
        "versions": {name: facts[f"{name}_version"] for name in packages if f"{name}_version" in facts},
        "model_path": settings.model.path,
        "max_total_num_tokens": max_total_tokens,
        "max_req_input_len": min(settings.model.context_length, max_total_tokens) - 1,
        "settings": cast("dict[str, object]", msgspec.to_builtins(settings)),
        "facts": dict(facts),
    }
