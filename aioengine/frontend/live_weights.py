"""New weights for a running engine, on all replicas or on none, and memory that is freed for a while."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

import msgspec
from msgspec.structs import replace

from aioengine.api import checks
from aioengine.errors import RequestError
from aioengine.frontend import tensor_arguments
from aioengine.frontend.controls import Controls, Outcome
from aioengine.model_files import checkpoint, model_folder, tensor_file
from aioengine.model_files.tensor_file import TensorFile, dtype_name
from aioengine.protocol.messages import Argument, Reply
from aioengine.protocol.weight_messages import DTYPE_NAMES, MEMORY_TAGS, NOT_OPEN, CudaTensor, WeightCall
from aioengine.settings.config import LoadedWeights
from aioengine.supervision.fleet import Processes
from aioengine.supervision.ledger import LOST_WEIGHTS
from aioengine.supervision.tasks import in_thread

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

UPDATE_TIMEOUT_S: Final = 600.0


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


class _OpenUpdate:
    """An update from ``begin_weight_update`` to ``end_weight_update``.

    number: unique. version: given by the user; None: none was given. files: with its tensors, if they are kept.
    is_complete: all its tensors are in files. loss: why it cannot be continued; "": it can.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.version: str | None = None
        self.files: list[TensorFile] = []
        self.is_complete = True
        self.loss = ""


def _shielded(
    method: Callable[Concatenate[LiveWeights, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[LiveWeights, Arguments], Coroutine[Any, Any, Result]]:
    """Run a method after the others, and to its end, even if its caller is cancelled.

    Otherwise files might be closed before the processes have read them.
    """

    async def run(self: LiveWeights, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        def ended(task: asyncio.Task[Result]) -> None:
            self.lock.release()
            if not task.cancelled():
                task.exception()  # otherwise asyncio logs it, if the caller was cancelled

        await self.lock.acquire()
        task = self.task = asyncio.create_task(method(self, *args, **kwargs))
        task.add_done_callback(ended)
        return await asyncio.shield(task)

    return run


class LiveWeights:
    """Updates the weights of all replicas. On the engine's loop."""

    def __init__(
        self,
        controls: Controls,
        processes: Processes,
        facts: Mapping[str, object],
        *,
        keeps_copies: bool,
        has_one_runner: bool,
    ) -> None:
        """facts: of the runner. keeps_copies: keep copies of tensors for new processes."""
        self._controls = controls
        self._processes = processes
        self._keeps_copies = keeps_copies
        self._first_version = str(facts.get("weight_version", processes.weights.version))
        self._gpu = str(facts.get("device_uuid", "")) if has_one_runner and not keeps_copies else ""
        self.lock = asyncio.Lock()
        self.task: asyncio.Task[Any] | None = None  # holds the lock
        self._update: _OpenUpdate | None = None
        self._num_updates = 0
        self._released: set[str] = set()  # tags of memory
        self._files: list[TensorFile] = []

    @property
    def loaded(self) -> LoadedWeights:
        """The weights that compute new requests."""
        weights = self._processes.weights
        return weights if weights.number else replace(weights, version=self._first_version)

    @_shielded
    async def from_disk(self, model_path: object, load_format: object, weight_version: object) -> WeightUpdate:
        """Replace all weights by a checkpoint. See ``AsyncEngine.update_weights_from_disk``."""
        path = _path(model_path)
        tensor_arguments.check_format(load_format, "safetensors", "gguf")
        version = _version(weight_version)
        try:
            folder = await in_thread(partial(model_folder.locate, path))
        except ValueError as error:
            return WeightUpdate(False, str(error))
        if await self._has_lost_update():
            self._end_update()
        checked = await self._ask(WeightCall.CHECK, {"path": folder})
        if not checked.success:
            return WeightUpdate(False, checked.message)
        files: dict[str, str] = _data(checked)
        number, version = self._next(version)
        loaded = LoadedWeights(version=version, number=number, path=folder, files=files, disk_version=version)
        try:
            await in_thread(partial(checkpoint.check_unchanged, files, "after it was checked"))
        except ValueError as error:
            return WeightUpdate(False, str(error))
        result = await self._ask_to_load({"path": folder}, loaded)
        if result:
            self._keep_copies([])
            self._end_update()
        return result

    @_shielded
    async def from_tensors(self, named_tensors: object, load_format: object, weight_version: object) -> WeightUpdate:
        """Replace some weights. See ``AsyncEngine.update_weights_from_tensor``."""
        tensors = tensor_arguments.checked("named_tensors", named_tensors)
        tensor_arguments.check_format(load_format)
        version = _version(weight_version)
        if self._update is None and self.loaded.are_lost:
            return WeightUpdate(False, LOST_WEIGHTS)
        if self._gpu and (handles := await in_thread(partial(_cuda_handles, tensors, self._gpu))):
            return await self._check_and_load({"handles": handles}, version, None)
        file = await in_thread(partial(tensor_file.write, tensors))
        result = WeightUpdate(False, "")
        try:
            result = await self._check_and_load({"path": file.path}, version, file)
        finally:
            if not (result and self._keeps_copies):
                file.close()
        return result

    async def _check_and_load(
        self, source: dict[str, Argument], version: str | None, file: TensorFile | None
    ) -> WeightUpdate:
        """Check and load tensors. file: where they are; None: in the memory of a GPU."""
        arguments = {**source, "is_part": True}
        checked = await self._ask(WeightCall.CHECK, arguments)
        if not checked.success:
            shown = "" if file is None else f"{file.path}: "
            return WeightUpdate(False, checked.message.replace(shown, ""))
        return await self._load_and_record(arguments, version, file)

    async def _load_and_record(
        self, arguments: dict[str, Argument], version: str | None, file: TensorFile | None
    ) -> WeightUpdate:
        """Load checked tensors."""
        new_files = [file] if file is not None and self._keeps_copies else []
        if (update := self._update) is not None:
            result = await self._ask_to_load(arguments)
            if result:
                update.version = version or update.version
                update.files += new_files
                update.is_complete &= bool(new_files)
            return result
        files = _needed([*self._files, *new_files])
        loaded = self._with_files(files, version, are_kept=bool(new_files) and self.loaded.are_kept)
        result = await self._ask_to_load(arguments, loaded)
        if result:
            self._keep_copies(files)
        return result

    @_shielded
    async def join(
        self, address: object, port: object, rank_offset: object, world_size: object, group: object, backend: object
    ) -> Outcome:
        """See ``AsyncEngine.init_weights_update_group``."""
        arguments: dict[str, Argument] = {
            "address": checks.text("master_address", address),
            "port": checks.whole("master_port", port, 1, 65535),
            "rank_offset": checks.whole("rank_offset", rank_offset, 1),
            "world_size": checks.whole("world_size", world_size, 2),
            "group": checks.text("group_name", group),
            "backend": checks.choice("backend", backend, {"nccl": "nccl", "gloo": "gloo"}),
        }
        reply = await self._ask(WeightCall.JOIN_GROUP, arguments)
        return Outcome(reply.success, reply.message)

    @_shielded
    async def leave(self, group: object) -> Outcome:
        """See ``AsyncEngine.destroy_weights_update_group``."""
        reply = await self._ask(WeightCall.LEAVE_GROUP, {"group": checks.text("group_name", group)})
        return Outcome(reply.success, reply.message)

    @_shielded
    async def from_group(
        self,
        names: object,
        dtypes: object,
        shapes: object,
        group: object,
        load_format: object,
        weight_version: object,
    ) -> WeightUpdate:
        """See ``AsyncEngine.update_weights_from_distributed``."""
        listed = _listed(names, dtypes, shapes)
        tensor_arguments.check_format(load_format)
        version = _version(weight_version)
        arguments: dict[str, Argument] = {
            "tensors": json.dumps(listed),
            "group": checks.text("group_name", group),
            "keeps": self._keeps_copies,
        }
        reply = await self._ask(WeightCall.RECEIVE, arguments)
        if not reply.success:
            return WeightUpdate(False, reply.message)
        if self._update is None and self.loaded.are_lost:
            return WeightUpdate(False, LOST_WEIGHTS)
        file: TensorFile | None = None
        result = WeightUpdate(False, "")
        try:
            if self._keeps_copies:
                file = tensor_file.opened(_data(reply), (name for name, _, _ in listed))
            result = await self._load_and_record({"received": True, "is_part": True}, version, file)
        except FileNotFoundError:
            return WeightUpdate(False, "the process was lost after it had received the tensors; send them again")
        finally:
            if file is not None and not result:
                file.close()
        return result

    @_shielded
    async def begin(self, selector: object) -> Outcome:
        """See ``AsyncEngine.begin_weight_update``."""
        checks.choice("selector", selector, {"all": "all", "target": "target"})
        if self._update is not None and not await self._has_lost_update():
            return Outcome(False, "a weight update is open already; call end_weight_update first")
        self._end_update()
        self._num_updates += 1
        update = _OpenUpdate(self._num_updates)
        reply = await self._ask(WeightCall.BEGIN, {"update": update.number})
        if reply.success:
            self._update = update
        return Outcome(reply.success, reply.message)

    @_shielded
    async def end(self, weight_version: object) -> Outcome:
        """See ``AsyncEngine.end_weight_update``."""
        version = _version(weight_version)
        if (update := self._update) is None:
            return Outcome(False, "no weight update is open; call begin_weight_update first")
        checked = await self._ask(WeightCall.CHECK, {"ends": True})
        if not checked.success:
            if update.loss:
                self._end_update()
            return Outcome(False, checked.message)
        files = _needed([*self._files, *update.files])
        loaded = self._with_files(files, version or update.version, are_kept=update.is_complete)
        result = await self._ask_to_load({}, loaded, WeightCall.END)
        if result:
            update.files = [file for file in update.files if file not in files]
            self._keep_copies(files)
        self._end_update()
        return Outcome(result.success, result.message)

    @_shielded
    async def change_memory(self, tags: object, name: str) -> None:
        """Release or resume memory. See ``AsyncEngine.release_memory_occupation``."""
        chosen = MEMORY_TAGS if tags is None else checks.sequence("tags", [tags] if isinstance(tags, str) else tags)
        names = {checks.choice("tags entries", tag, {tag: tag for tag in MEMORY_TAGS}) for tag in chosen}
        is_release = name == WeightCall.RELEASE_MEMORY
        if wrong := names & self._released if is_release else names - self._released:
            state = "already released" if is_release else "not released"
            raise RuntimeError(f"the memory of {', '.join(sorted(wrong))} is {state}")
        reply = await self._ask(name, {"tags": sorted(names)})
        if not reply.success:
            raise RuntimeError(reply.message)
        self._released = self._released | names if is_release else self._released - names

    async def get(self, name: object, truncate_size: object) -> Any:
        """See ``AsyncEngine.get_weights_by_name``."""
        text, num_rows = checks.text("name", name), checks.whole("truncate_size", truncate_size, 1)
        reply = await self._controls.ask(WeightCall.GET, {"name": text, "num_rows": num_rows})
        if not reply.success:
            raise ValueError(reply.message)
        return json.loads(reply.data)

    def close(self) -> None:
        """Free the copies of tensors."""
        self._keep_copies([])
        self._end_update()

    def _next(self, version: str | None) -> tuple[int, str]:
        """Return number and version of the weights after the next update."""
        number = self.loaded.number + 1
        return number, version or str(number)

    def _with_files(self, files: list[TensorFile], version: str | None, *, are_kept: bool) -> LoadedWeights:
        """Return the weights after an update by the tensors in these files, and in others unless ``are_kept``."""
        number, version = self._next(version)
        paths = tuple(file.path for file in files)
        return replace(
            self.loaded, number=number, version=version, tensor_files=paths, are_kept=are_kept, are_lost=False
        )

    async def _has_lost_update(self) -> bool:
        """Return whether there is an open update whose process was lost."""
        if self._update is not None and not self._update.loss:
            await self._ask(WeightCall.CHECK, {"ends": True})  # sets ``loss``
        return self._update is not None and bool(self._update.loss)

    def _end_update(self) -> None:
        """Forget the open update and its files."""
        if self._update is not None:
            _close(self._update.files)
        self._update = None

    def _keep_copies(self, files: list[TensorFile]) -> None:
        """Keep these copies of tensors, and free all others."""
        _close([file for file in self._files if file not in files])
        self._files = files

    async def _ask_to_load(
        self, arguments: dict[str, Argument], loaded: LoadedWeights | None = None, name: str = WeightCall.LOAD
    ) -> WeightUpdate:
        text = "" if loaded is None else msgspec.json.encode(loaded).decode()
        reply = await self._ask(name, {**arguments, "weights": text})
        if not reply.success:
            return WeightUpdate(False, reply.message)
        counts = cast("int | list[int]", json.loads(reply.data or "0"))
        return WeightUpdate(True, "", sum(counts) if isinstance(counts, list) else counts)

    async def _ask(self, name: str, arguments: dict[str, Argument]) -> Reply:
        """Send a control call. The loss of the scheduler process is a failure, too.

        If the process of an open update was lost, its next tensors must not become an update of their own.
        """
        if self._update is not None and self._update.loss and name in (WeightCall.CHECK, WeightCall.RECEIVE):
            return Reply(0, False, self._update.loss)
        number = 0 if self._update is None else self._update.number
        try:
            reply = await self._controls.ask(name, {"update": number, **arguments}, timeout_s=UPDATE_TIMEOUT_S)
        except RequestError as error:
            return Reply(0, False, str(error))
        if NOT_OPEN in reply.data and self._update is not None:
            self._update.loss = reply.message
            await self._ask(WeightCall.CANCEL, {})  # the replicas that still have the update would wait for its end
        return reply


def _data(reply: Reply) -> Any:
    """Return the data of a reply. With several replicas, it is a list of equal entries."""
    data = json.loads(reply.data)
    return data[0] if isinstance(data, list) else data


def _path(value: object) -> str:
    if not isinstance(value, str | PurePath):
        raise checks.wrong_type("model_path", "a path or the name of a model", value)
    return checks.text("model_path", str(value))


def _version(value: object) -> str | None:
    return None if value is None else checks.text("weight_version", value, if_empty="leave it out")


def _listed(names: object, dtypes: object, shapes: object) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype and shape of each tensor to receive. dtypes: of torch, or their names."""
    lists = [checks.sequence("names", names), checks.sequence("dtypes", dtypes), checks.sequence("shapes", shapes)]
    if len({len(values) for values in lists}) > 1:
        raise ValueError(f"names, dtypes and shapes have different lengths: {[len(own) for own in lists]}")
    tensors: list[tuple[str, str, list[int]]] = []
    for name, dtype, shape in zip(*lists, strict=True):
        text = str(dtype).removeprefix("torch.")
        if text not in DTYPE_NAMES:
            raise checks.wrong_value("dtypes entries", f"one of {', '.join(DTYPE_NAMES)}", dtype)
        sizes = [checks.whole("sizes in shapes", size, 0) for size in checks.sequence("shapes entries", shape)]
        tensors.append((checks.text("names entries", name), DTYPE_NAMES[text], sizes))
    return tensors


def _cuda_handles(tensors: Mapping[str, Any], gpu: str) -> str:
    """Return ``CudaTensor``s as JSON; "": the tensors are not all on this GPU, or cannot be shared."""
    torch: Any = sys.modules["torch"]
    shared: list[CudaTensor] = []
    for tensor in tensors.values():
        if tensor.device.type != "cuda" or str(torch.cuda.get_device_properties(tensor.device).uuid) != gpu:
            return ""
    try:
        for name, tensor in tensors.items():
            _, *storage = tensor.untyped_storage()._share_cuda_()
            view = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            shared.append(CudaTensor(name, dtype_name(tensor), *view, *storage))
    except RuntimeError:  # memory of expandable segments, for example
        return ""
    return msgspec.json.encode(shared).decode()


def _needed(files: list[TensorFile]) -> list[TensorFile]:
    """Return the files that have a tensor which no later file has."""
    needed: list[TensorFile] = []
    later: set[str] = set()
    for file in reversed(files):
        if file.names - later:
            needed.append(file)
            later |= file.names
    return needed[::-1]


def _close(files: Iterable[TensorFile]) -> None:
    for file in files:
        file.close()
