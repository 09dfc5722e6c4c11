"""The methods of both engines for new weights, pauses, and memory that is freed for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioengine.api import checks, signatures
from aioengine.protocol.weight_messages import RELEASE_MEMORY, RESUME_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import PurePath

    from aioengine.frontend.controls import Outcome, PauseMode
    from aioengine.frontend.frontend import Frontend
    from aioengine.frontend.live_weights import WeightUpdate


async def pause_generation(self: Any, mode: PauseMode = "abort") -> Outcome:
    """Stop computing until ``continue_generation``; new calls wait.

    ``mode``: "abort" ends all requests. "in_place" keeps them and their KV. "retract" keeps them; their KV is computed
    again when they continue.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.controls.pause(mode)


async def continue_generation(self: Any) -> Outcome:
    """Continue after ``pause_generation``."""
    frontend: Frontend = self._frontend_here()
    return await frontend.controls.unpause()


@signatures.own_arguments
async def update_weights_from_disk(
    self: Any,
    model_path: str | PurePath,
    load_format: str | None = None,
    *,
    flush_cache: bool = True,
    weight_version: str | None = None,
) -> WeightUpdate:
    """Replace all weights by another checkpoint of the same model, without a restart.

    The result is true if it succeeded. Otherwise nothing has changed, and ``message`` says why: names, shapes,
    types and numbers of all tensors are checked before the first one is replaced, on all replicas.

    The weights change between two steps. Running requests keep their tokens, and their KV is computed again with
    the new weights; after ``pause_generation("in_place")`` they keep their KV, too. Cached prefixes of the old
    weights are not used any more. ``meta_info["weight_version"]`` of each chunk is the version of its last token,
    and ``meta_info["weight_versions"]`` of a finished request lists all versions: ``(version, start, stop)`` for
    its output tokens from ``start`` to ``stop``. If a process is replaced later, it loads these weights, so the
    files must stay unchanged.

    load_format: "auto" (default), "safetensors" or "gguf"; the files decide. flush_cache: has no effect, because old
    prefixes are never used with new weights. weight_version: the name of the new weights (default: the number of
    updates).

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    checks.switch("flush_cache", flush_cache)
    return await frontend.weights.from_disk(model_path, load_format, weight_version)


@signatures.own_arguments
async def update_weights_from_tensor(
    self: Any,
    named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
    load_format: str | None = None,
    flush_cache: bool = True,
    *,
    weight_version: str | None = None,
) -> WeightUpdate:
    """Replace some or all weights by torch tensors with names and shapes of the checkpoint.

    As ``update_weights_from_disk``, but any part of the tensors is enough. All are checked before the first one is
    replaced, and the tensors may change again after this call. Tensors on a CPU are copied to memory that the processes
    share, in a thread. Tensors on the GPU of the engine are read where they are, if it is the only GPU of the engine.

    Between ``begin_weight_update`` and ``end_weight_update``, tensors may come in several calls. If the process that
    computes is lost later, these weights are lost, and open requests end with ``RequestError``;
    ``enable_weights_cpu_backup=True`` of the constructor keeps a copy, with which they continue.

    load_format: None or "auto". flush_cache: has no effect, as in ``update_weights_from_disk``.

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    checks.switch("flush_cache", flush_cache)
    return await frontend.weights.from_tensors(named_tensors, load_format, weight_version)


@signatures.own_arguments
async def begin_weight_update(self: Any, selector: str = "all") -> Outcome:
    """Compute no more steps until ``end_weight_update``. In between, all weights are replaced, in any number of calls.

    ``update_weights_from_disk`` ends the update, too. The result is false if an update is open already. selector: "all"
    or "target".

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.weights.begin(selector)


@signatures.own_arguments
async def end_weight_update(self: Any, *, weight_version: str | None = None) -> Outcome:
    """Continue with the new weights.

    The result is false if no update is open, or if tensors are missing: then the update stays open, and the message
    names them. After the loss of a process, the update is not open any more, and the old weights compute.

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.weights.end(weight_version)


@signatures.own_arguments
async def get_weights_by_name(self: Any, name: str, truncate_size: int = 100) -> list[Any] | None:
    """Return the first ``truncate_size`` rows of a tensor of the checkpoint as lists of numbers; None: unknown name.

    With several replicas, return the list of their results.

    Raises:
        TypeError, ValueError: an argument is wrong, or the tensor is quantized or divided among ranks.
        EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    rows: list[Any] | None = await frontend.weights.get(name, truncate_size)
    return rows


@signatures.own_arguments
async def init_weights_update_group(
    self: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
) -> Outcome:
    """Join a process group that the training program opens, in which it has rank 0.

    Rank ``r`` of the engine joins with rank ``rank_offset + r``; with several replicas, the ranks of the next one
    follow. No step runs until all have joined. backend: "nccl", or "gloo" for tensors on a CPU. The result is false if
    the program cannot be reached within five minutes.

    Raises:
        TypeError, ValueError: an argument is wrong. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.weights.join(master_address, master_port, rank_offset, world_size, group_name, backend)


@signatures.own_arguments
async def destroy_weights_update_group(self: Any, group_name: str = "weight_update_group") -> Outcome:
    """Leave a group of ``init_weights_update_group``. The result is false if the engine is in no such group.

    Raises:
        TypeError, ValueError: an argument is wrong. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.weights.leave(group_name)


@signatures.own_arguments
async def update_weights_from_distributed(
    self: Any,
    names: Sequence[str],
    dtypes: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    group_name: str = "weight_update_group",
    flush_cache: bool = True,
    load_format: str | None = None,
    *,
    weight_version: str | None = None,
) -> WeightUpdate:
    """Replace some or all weights by tensors that rank 0 of the group broadcasts, in the order of ``names``.

    As ``update_weights_from_tensor``; no step runs meanwhile. dtypes: of torch, or their names.

    Raises:
        TypeError, ValueError: an argument is wrong. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    checks.switch("flush_cache", flush_cache)
    return await frontend.weights.from_group(names, dtypes, shapes, group_name, load_format, weight_version)


@signatures.own_arguments
async def release_memory_occupation(self: Any, tags: Sequence[str] | str | None = None) -> None:
    """Free memory for another program until ``resume_memory_occupation``. Requests wait until then.

    The engine needs ``enable_memory_saver=True``. No request may be running: finish them, or call
    ``pause_generation("retract")`` before. tags: "kv_cache" (the prefix cache is emptied, too), "weights" (they are
    loaded again later) and "cuda_graph"; None: all of them. On a GPU, the KV cache comes back at the same addresses.
    Releasing weights also frees the CUDA graphs, which are captured again when all memory is resumed.

    Raises:
        TypeError, ValueError: ``tags`` is wrong. EngineClosedError, EngineDeadError.
        RuntimeError: this memory is released already, or cannot be released; the message says why.
    """
    frontend: Frontend = self._frontend_here()
    await frontend.weights.change_memory(tags, RELEASE_MEMORY)


@signatures.own_arguments
async def resume_memory_occupation(self: Any, tags: Sequence[str] | str | None = None) -> None:
    """Allocate released memory again. tags: as of ``release_memory_occupation``.

    Raises:
        TypeError, ValueError: ``tags`` is wrong. EngineClosedError, EngineDeadError.
        RuntimeError: this memory is not released.
    """
    frontend: Frontend = self._frontend_here()
    await frontend.weights.change_memory(tags, RESUME_MEMORY)
