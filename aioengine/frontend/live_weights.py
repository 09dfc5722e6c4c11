"""New weights for a running engine: on all replicas, or on none."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from aioengine.api import checks
from aioengine.errors import RequestError
from aioengine.model_files import model_folder
from aioengine.protocol.messages import Argument, Reply
from aioengine.protocol.weight_messages import CHECK_WEIGHTS, LOAD_WEIGHTS
from aioengine.settings.config import LoadedWeights
from aioengine.supervision.tasks import WorkerThread

if TYPE_CHECKING:
    from aioengine.frontend.controls import Controls

UPDATE_TIMEOUT_S: Final = 600.0
LOAD_FORMATS: Final = ("auto", "safetensors", "gguf")
_MAX_EXIT_S: Final = 0.5


class WeightUpdate(NamedTuple):
    """The result of a call for new weights; true if it succeeded.

    num_paused_requests: requests that were running when the weights were replaced. After ``pause_generation`` they keep
    their KV; otherwise it is computed again.
    """

    success: bool
    message: str
    num_paused_requests: int = 0

    def __bool__(self) -> bool:
        return self.success


class LiveWeights:
    """Updates the weights of all replicas. On the engine's loop.

    Attributes:
        loaded: the current weights.
    """

    def __init__(self, controls: Controls, version: str) -> None:
        self.loaded = LoadedWeights(version=version)
        self._controls = controls
        self._lock = asyncio.Lock()

    async def from_disk(self, model_path: object, load_format: object, weight_version: object) -> WeightUpdate:
        """Replace all weights by a checkpoint. See ``AsyncEngine.update_weights_from_disk``."""
        path = _path(model_path)
        if load_format is not None:
            checks.choice("load_format", load_format, dict.fromkeys(LOAD_FORMATS))
        version = _version(weight_version)
        async with self._lock:
            thread = WorkerThread[str]("aioengine-weights", max_exit_s=_MAX_EXIT_S)
            try:
                folder = await asyncio.wrap_future(thread.submit(partial(model_folder.locate, path)))
            except ValueError as error:
                return WeightUpdate(False, str(error))
            finally:
                thread.close()
            checked = await self._ask(CHECK_WEIGHTS, {"path": folder})
            if not checked.success:
                return WeightUpdate(False, checked.message)
            files = cast("dict[str, str] | list[dict[str, str]]", json.loads(checked.data))
            number = self.loaded.number + 1
            loaded = LoadedWeights(
                version=str(number) if version is None else version,
                number=number,
                path=folder,
                files=files[0] if isinstance(files, list) else files,
            )
            return await self._load(loaded, {"path": folder})

    async def _load(self, loaded: LoadedWeights, arguments: dict[str, Argument]) -> WeightUpdate:
        text = msgspec.json.encode(loaded).decode()
        reply = await self._ask(LOAD_WEIGHTS, {**arguments, "weights": text})
        if not reply.success:
            return WeightUpdate(False, reply.message)
        self.loaded = loaded
        counts = cast("int | list[int]", json.loads(reply.data or "0"))
        return WeightUpdate(True, "", sum(counts) if isinstance(counts, list) else counts)

    async def _ask(self, name: str, arguments: dict[str, Argument]) -> Reply:
        """Send a control call. The loss of the scheduler process is a failure, too."""
        try:
            return await self._controls.ask(name, arguments, timeout_s=UPDATE_TIMEOUT_S)
        except RequestError as error:
            return Reply(0, False, str(error))


def _path(value: object) -> str:
    if not isinstance(value, str | PurePath):
        raise checks.wrong_type("model_path", "a path or the name of a model", value)
    return checks.text("model_path", str(value))


def _version(value: object) -> str | None:
    return None if value is None else checks.text("weight_version", value, max_bytes=1024)
