"""What an engine tells about itself: health, settings, the model. Plain data, JSON-serialisable."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypedDict, cast

import msgspec

from aioengine import checks
from aioengine.answers import WEIGHT_VERSION
from aioengine.errors import EngineClosedError, EngineStalledError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.frontend.frontend import Frontend
    from aioengine.protocol.messages import Reply
    from aioengine.tokenizer import Tokenizer


__version__: Final = "0.1.0"

ALIVE: Final = ("running", "draining", "recovering")
"""The states in which requests are taken, or come to their ends."""

PauseMode = Literal["abort", "in_place"]


class Outcome(NamedTuple):
    """How an order to the engine went; true where it was carried out."""

    success: bool
    message: str

    def __bool__(self) -> bool:
        return self.success


class ProcessHealth(TypedDict):
    """One process of the engine; times are seconds since its last sign of life and its last finished step."""

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
    """What is served."""

    model_path: str
    tokenizer_path: str | None
    is_generation: bool
    weight_version: str
    load_format: str
    dtype: str
    context_length: int
    vocab_size: int


class TokenizerNamespace:
    """The old home of the tokenizer and of ``abort_request``."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return tokenizer(self._frontend)

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> None:
        """End a live request, or all."""
        self._frontend.abort_request(rid, abort_all)


def described(kind: str, model: str, state: str) -> str:
    """The ``repr`` of an engine; ``model`` may be empty."""
    return f"<{' '.join(filter(None, (kind, model, state)))}>"


def state(frontend: Frontend) -> str:
    """The word for how the engine is."""
    failure = frontend.failure
    if failure is None:
        if frontend.parts.processes.is_recovering:
            return "recovering"
        return "draining" if frontend.calls.is_draining else "running"
    if isinstance(failure, EngineClosedError):
        return "closed"
    return "stalled" if isinstance(failure, EngineStalledError) else "dead"


def health(frontend: Frontend, *, is_forked: bool = False) -> Health:
    """How the engine and each of its processes are; ``is_forked``: they are another process's."""
    return {
        "state": "closed" if is_forked else state(frontend),
        "processes": [
            {
                "role": process.role,
                "pid": process.pid,
                "alive": process.alive,
                "last_heartbeat_s": process.last_heartbeat_s,
                "last_step_s": process.last_step_s,
            }
            for process in frontend.parts.processes.processes()
        ],
    }


def stats(frontend: Frontend) -> dict[str, int]:
    """The last counters of the scheduler, with the frontend's own. From any thread."""
    last = frontend.last_stats
    return {
        "num_running": last.num_running if last else 0,
        "num_waiting": last.num_waiting if last else 0,
        "num_streams": sum(output.num_open for output in list(frontend.calls.by_output)),
        "num_detokenizing": frontend.router.num_detokenizing,
        "num_pages": last.num_pages if last else 0,
        "num_free_pages": last.num_free_pages if last else 0,
        "num_cached_pages": last.num_cached_pages if last else 0,
        "num_preemptions": last.num_preemptions if last else 0,
        "num_restarts": frontend.parts.processes.num_restarts,
        "num_steps": last.num_steps if last else 0,
        "prompt_tokens": last.prompt_tokens if last else 0,
        "cached_tokens": last.cached_tokens if last else 0,
        "output_tokens": last.output_tokens if last else 0,
        "num_finished": last.num_finished if last else 0,
        "num_aborted": last.num_aborted if last else 0,
    }


def child_pids(frontend: Frontend) -> list[int]:
    """The processes that are alive."""
    processes = frontend.parts.processes.processes()
    return [process.pid for process in processes if process.alive]


def model_info(frontend: Frontend) -> ModelInfo:
    """The model of the engine."""
    settings = frontend.parts.settings
    return {
        "model_path": settings.model.path,
        "tokenizer_path": settings.text.tokenizer_path,
        "is_generation": True,
        "weight_version": WEIGHT_VERSION,
        "load_format": settings.model.load_format,
        "dtype": settings.model.dtype,
        "context_length": settings.model.context_length,
        "vocab_size": settings.model.vocab_size,
    }


async def server_info(frontend: Frontend) -> dict[str, object]:
    """The engine's settings and its scheduler's own words."""
    reply = await frontend.controls.ask("server_info")
    parts = frontend.parts
    told = cast("dict[str, object] | list[dict[str, object]]", json.loads(reply.data) if reply.data else {})
    replicas = told if isinstance(told, list) else [told]
    return {
        "status": "ready" if frontend.failure is None else state(frontend),
        "version": __version__,
        **_device_info(parts.facts),
        "model_path": parts.settings.model.path,
        "max_total_num_tokens": parts.max_total_tokens,
        "max_req_input_len": min(parts.settings.model.context_length, parts.max_total_tokens) - 1,
        "settings": cast("dict[str, object]", msgspec.to_builtins(parts.settings)),
        "facts": dict(parts.facts),
        "internal_states": [one.get("stats", {}) for one in replicas],
    }


def _device_info(facts: Mapping[str, object]) -> dict[str, object]:
    """What it computes on and with, from what the scheduler process told when it was ready."""
    names = ("device", "device_name", "dtype", "attention_backend", "num_threads")
    sizes = ("weights", "kv_pool", "graphs", "free", "total")
    packages = ("torch", "triton", "flashinfer")
    return {
        **{name: facts[name] for name in names if name in facts},
        "cuda_graph_sizes": [int(size) for size in str(facts.get("cuda_graph_sizes", "")).split()],
        "memory": {f"{name}_bytes": facts[f"{name}_bytes"] for name in sizes if f"{name}_bytes" in facts},
        "start": {name.removeprefix("start_"): value for name, value in facts.items() if name.startswith("start_")},
        "versions": {name: facts[f"{name}_version"] for name in packages if f"{name}_version" in facts},
    }


async def order(frontend: Frontend, name: str) -> Outcome:
    """Have the scheduler do something."""
    return outcome(await frontend.controls.ask(name))


async def pause(frontend: Frontend, mode: PauseMode) -> Outcome:
    """Hold the scheduler, and with "abort" end what it has."""
    if checks.choice("mode", mode, {"abort": True, "in_place": False}):
        frontend.end_all()
    return await order(frontend, "pause")


async def freeze_gc(frontend: Frontend) -> None:
    """Leave what lives now out of garbage collections, here and in the scheduler process."""
    gc.collect()
    gc.freeze()
    await order(frontend, "freeze_gc")


def outcome(reply: Reply) -> Outcome:
    return Outcome(reply.success, reply.message)


def tokenizer(frontend: Frontend) -> Tokenizer:
    """The engine's tokenizer.

    Raises:
        ValueError: the engine was started without one.
    """
    if frontend.parts.tokenizer is None:
        raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
    return frontend.parts.tokenizer
