"""The methods of both engines for new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioengine.api import signatures

if TYPE_CHECKING:
    from pathlib import PurePath

    from aioengine.frontend.frontend import Frontend
    from aioengine.frontend.live_weights import WeightUpdate


@signatures.own_arguments
async def update_weights_from_disk(
    self: Any,
    model_path: str | PurePath,
    load_format: str | None = None,
    *,
    weight_version: str | None = None,
) -> WeightUpdate:
    """Replace all weights by those of another checkpoint of the same model, without a restart.

    The result is true if it succeeded. Otherwise nothing has changed, and ``message`` says why: names, shapes,
    types and numbers of all tensors are checked before the first one is replaced, on all replicas.

    The weights change between two steps. Running requests keep their tokens, and their KV is computed again with
    the new weights; after ``pause_generation("in_place")`` they keep their KV, too. Cached prefixes of the old
    weights are not used any more. ``meta_info["weight_version"]`` of each chunk is the version of its last token,
    and ``meta_info["weight_versions"]`` of a finished request lists all versions: ``(version, start, stop)`` for
    its output tokens from ``start`` to ``stop``. If a process is replaced later, it loads these weights, so the
    files must stay.

    load_format: "auto" (default), "safetensors" or "gguf"; the files decide. weight_version: the name of the new
    weights (default: the number of updates).

    Raises:
        TypeError, ValueError: an argument has the wrong type. EngineClosedError, EngineDeadError.
    """
    frontend: Frontend = self._frontend_here()
    return await frontend.weights.from_disk(model_path, load_format, weight_version)
