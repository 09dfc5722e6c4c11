"""Replaces the weights of a running engine between two steps, and frees memory for a while."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, cast

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from aioengine import plugins
from aioengine.api import checks
from aioengine.layers.layer import Target
from aioengine.layers.ranks import RankGroup
from aioengine.model_files import folder_files
from aioengine.model_files.checkpoint import Entry, check_unchanged, file_states, listed
from aioengine.model_files.quantization import MAX_TEXT, TEXTS, read_config, split_config
from aioengine.model_files.tensor_file import dtype_name
from aioengine.models._base import Model
from aioengine.protocol.messages import Argument, Control, Fact, Reply
from aioengine.protocol.weight_messages import NOT_OPEN, CudaTensor, RefusedError, WeightCall, loaded_by
from aioengine.runner import weights
from aioengine.runner.model_runner import ModelRunner
from aioengine.runner.trainer_group import TrainerGroups
from aioengine.runner.weight_reading import DTYPES, check_all, check_finite, check_values, layer_of
from aioengine.settings.config import TRANSFORMERS, LoadedWeights, Settings

RELEASED: Final = "the weights are released; call resume_memory_occupation first"


class WeightsBrokenError(BaseException):
    """New weights could not be loaded completely, or released memory could not be allocated again.

    It is no ``Exception``, because the old weights are lost: the process ends, and the next one starts with the new
    weights.
    """


@dataclass(frozen=True, slots=True)
class _FileTensors:
    """New tensors in files. entries: their names, shapes and dtypes match the model."""

    entries: list[Entry]

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.entries}

    def check(self, targets: Mapping[str, Target]) -> None:
        check_all(self.entries, targets)

    def write(self, targets: Mapping[str, Target]) -> None:
        weights.read(self.entries, targets, lambda done, total: None)


@dataclass(frozen=True, slots=True)
class _DeviceTensors:
    """New tensors [...] on the device of the model, by name. Their names, shapes and dtypes match the model."""

    tensors: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        return {*self.tensors}

    def check(self, targets: Mapping[str, Target]) -> None:
        for name, tensor in self.tensors.items():
            check_finite(tensor, targets[name].tensor.dtype, f"tensor {name}")
            check_values(tensor, name, targets[name])

    def write(self, targets: Mapping[str, Target]) -> None:
        for name, tensor in self.tensors.items():
            target = targets[name]
            if name.endswith(TEXTS):  # the rest of a shorter text is 0
                tensor = functional.pad(tensor.flatten(), (0, MAX_TEXT - tensor.numel()))
            target.write(tensor.view(target.shape)[target.index])


class WeightLoader:
    """Checks and loads new weights of a model.

    Attributes:
        controls: see ``scheduler.runner.Runner``.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        facts: dict[str, Fact],
        *,
        make_empty: Callable[[], Model],
        runner: ModelRunner,
        capture_graphs: Callable[[], None],
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the tensors that were loaded after the checkpoint, if there are any.

        facts: of the runner; the facts about weights are kept in them.
        make_empty: returns the same model on the device "meta".
        capture_graphs: captures the CUDA graphs of the runner again, after they were dropped.
        ranks: None if there is one rank.
        """
        self._groups = TrainerGroups(settings.runner)
        calls: dict[str, Callable[[Mapping[str, Argument]], str | None]] = {
            WeightCall.CHECK: self._check,
            WeightCall.LOAD: self._load,
            WeightCall.BEGIN: self._begin,
            WeightCall.END: self._end,
            WeightCall.CANCEL: self._cancel,
            WeightCall.GET: self._get,
            WeightCall.JOIN_GROUP: self._groups.join,
            WeightCall.LEAVE_GROUP: self._groups.leave,
            WeightCall.RECEIVE: self._receive,
            WeightCall.RELEASE_MEMORY: self._release,
            WeightCall.RESUME_MEMORY: self._resume,
        }
        self.controls = {name: partial(_reply_to, call) for name, call in calls.items()}
        self._model = model
        self._settings = settings
        self._facts = facts
        self._make_empty = make_empty
        self._runner = runner
        self._capture_graphs = capture_graphs
        self._released: set[str] = set()  # tags
        self._lacks_graphs = False
        self._ranks = ranks
        self._update = 0  # number of the open update
        self._arrived: set[str] = set()  # names of its tensors
        self._opened: tuple[str, _DeviceTensors] | None = None
        """The checked tensors of another process, and their handles, which may be opened only once."""
        self._replace_by_files(settings.model.weights.tensor_files)
        self._note(settings.model.weights)

    def _note(self, loaded: LoadedWeights) -> None:
        self._loaded = loaded
        self._facts |= {"weight_version": loaded.version, "num_weight_loads": loaded.number, "lacks_weights": False}

    # ------------------------------------------------------------ control calls: they return the data of the reply

    def _check(self, arguments: Mapping[str, Argument]) -> str | None:
        """Check new weights. Return the digests of the files of a checkpoint."""
        self._require_update(arguments)
        try:
            if arguments.get("ends"):
                self._check_complete()
                return None
            new = self._tensors_of(arguments)
            self._check_model(None if arguments.get("is_part") else Path(str(arguments["path"])))
            files = file_states(entry.path for entry in new.entries) if isinstance(new, _FileTensors) else {}
            new.check(self._targets)
            check_unchanged(files, "while it was checked")
        except ValueError as error:
            raise RefusedError(str(error)) from error
        return json.dumps(files)

    def _load(self, arguments: Mapping[str, Argument]) -> None:
        self._require_update(arguments)
        loaded = loaded_by(arguments)
        if loaded is not None and loaded.number == self._loaded.number:
            return  # the process has started with them, or the call arrived twice
        try:
            if loaded is not None and arguments.get("path") == loaded.path:
                check_unchanged(loaded.files, "after it was checked")
            new = self._tensors_of(arguments)
            self._replace(new)
        except Exception as error:
            raise WeightsBrokenError(f"new weights could not be loaded: {error}") from error
        self._opened = None
        self._groups.forget_received()
        if loaded is None:
            self._arrived |= new.names
        else:
            self._update = 0  # a checkpoint ends an open update
            self._note(loaded)

    def _begin(self, arguments: Mapping[str, Argument]) -> None:
        self._update, self._arrived = _update_of(arguments), set()
        self._facts["lacks_weights"] = True

    def _end(self, arguments: Mapping[str, Argument]) -> None:
        loaded = loaded_by(arguments)
        assert loaded is not None, "the end of an update names its weights"
        if loaded.number != self._loaded.number:
            self._require_update(arguments)
            self._update = 0
            self._note(loaded)

    def _cancel(self, _: Mapping[str, Argument]) -> None:
        """Let the next process start with the weights before the open update, because another replica has lost it."""
        if self._update:
            raise WeightsBrokenError("another replica was lost in the middle of an update of the weights")

    @torch.no_grad()
    def _get(self, arguments: Mapping[str, Argument]) -> str:
        """Return the first rows of a tensor as JSON, or null if there is no such tensor."""
        if "weights" in self._released:
            raise RefusedError(RELEASED)
        name, num_rows = str(arguments["name"]), int(str(arguments["num_rows"]))
        target = self._targets.get(name)
        if target is None:
            return "null"
        if target.writer is not None or target.source is not None:
            where = "quantized" if target.source is None else "divided among ranks"
            raise RefusedError(f"{name} is {where}, and cannot be returned")
        self._model.open_for_loading("", {layer_of(name)})
        rows = torch.atleast_1d(self._model.weights()[name].tensor)[:num_rows]
        numbers = (rows.float() if rows.is_floating_point() else rows).tolist()
        weights.finish(self._model)
        return json.dumps(numbers)

    def _receive(self, arguments: Mapping[str, Argument]) -> str | None:
        """Receive tensors before they are checked, because the program waits until all have received them."""
        self._require_update(arguments)
        try:
            tensors = self._groups.receive(arguments)
            self._check_model(None)
            new = self._device_tensors(tensors)
            new.check(self._targets)
        except (ValueError, RuntimeError) as error:
            raise RefusedError(str(error)) from error
        path = self._groups.keep(new.tensors, in_file=bool(arguments.get("keeps")))
        return None if path is None else json.dumps(path)

    def _release(self, arguments: Mapping[str, Argument]) -> None:
        tags = set(cast("list[str]", arguments["tags"])) - self._released
        if not self._settings.memory.can_release:
            raise RefusedError("this engine cannot release memory; give its constructor enable_memory_saver=True")
        if "weights" in tags and not self._loaded.are_kept:
            raise RefusedError(
                "weights that were given as tensors would be lost; enable_weights_cpu_backup=True keeps a copy"
            )
        if "weights" in tags and self._settings.model.implementation == TRANSFORMERS:
            raise RefusedError("the weights of a model in transformers' code cannot be released")
        if "kv_cache" in tags:
            self._runner.release_pools()
        if "weights" in tags:
            self._model.free_weights()
        if tags & {"weights", "cuda_graph"}:  # graphs contain the addresses of weights
            if self._runner.has_graphs:
                self._runner.drop_graphs()
                self._lacks_graphs = True
            weights.free_unused_memory()
        self._released |= tags
        self._facts["lacks_memory"] = True

    @torch.no_grad()
    def _resume(self, arguments: Mapping[str, Argument]) -> None:
        tags = set(cast("list[str]", arguments["tags"])) & self._released
        if "kv_cache" in tags:
            self._runner.resume_pools()
        try:
            if "weights" in tags:
                weights.load_newest(self._model, self._settings, self._loaded, lambda done, total: None)
                self._replace_by_files(self._loaded.tensor_files)
            if self._lacks_graphs and not self._released - tags:
                self._runner.resume_workspace()
                self._capture_graphs()
                self._lacks_graphs = False
        except Exception as error:
            raise WeightsBrokenError(f"released memory could not be allocated again: {error}") from error
        self._released -= tags
        self._facts["lacks_memory"] = bool(self._released)

    def _require_update(self, arguments: Mapping[str, Argument]) -> None:
        """Refuse a call if this process has no weights, or not the open update of the call."""
        if "weights" in self._released:
            raise RefusedError(RELEASED)
        if _update_of(arguments) != self._update:
            text = "no weight update is open, because the process was replaced after begin_weight_update; begin again"
            raise RefusedError(text, data=NOT_OPEN)

    # ------------------------------------------------------------ tensors

    @torch.no_grad()
    def _replace(self, new: _FileTensors | _DeviceTensors) -> None:
        """Replace weights, in place where the kernels read them as loaded."""
        self._model.open_for_loading("", {layer_of(name) for name in new.names})
        new.write(self._model.weights())
        weights.finish(self._model)
        self._runner.forget_features()
        if self._ranks is not None:
            self._ranks.all_reduce_min(0)  # all have read the files, which may be removed after the reply

    def _replace_by_files(self, paths: Iterable[str]) -> None:
        """Replace weights by the tensors of these files, one after the other."""
        for path in paths:
            self._replace(self._tensors_of({"path": path, "is_part": True}))

    def _tensors_of(self, arguments: Mapping[str, Argument]) -> _FileTensors | _DeviceTensors:
        """Return the new tensors of a control call: from files, from a broadcast, or from the GPU memory of another
        process. Raises ValueError if they do not match the model.
        """
        is_part = bool(arguments.get("is_part"))
        if path := str(arguments.get("path") or ""):
            shown = "this call" if is_part else ""
            entries = weights.checked_entries(self._model, Path(path), self._targets, is_part=is_part, shown=shown)
            return _FileTensors(entries)
        if arguments.get("received"):
            assert self._groups.received is not None, "nothing was received"
            return _DeviceTensors(self._groups.received)
        handles = str(arguments["handles"])
        if self._opened is None or self._opened[0] != handles:
            tensors = msgspec.json.decode(handles, type=list[CudaTensor])
            self._opened = handles, self._device_tensors({tensor.name: _opened(tensor) for tensor in tensors})
        return self._opened[1]

    def _device_tensors(self, tensors: Mapping[str, Tensor]) -> _DeviceTensors:
        """Return tensors [...] with the names of the model. Raises ValueError if they do not match the model."""
        entries = [
            Entry(name, Path(), tuple(tensor.shape), dtype_name(tensor), name) for name, tensor in tensors.items()
        ]
        entries = weights.matching_entries(self._model, entries, self._targets, is_part=True, shown="this call")
        return _DeviceTensors({entry.name: tensors[entry.stored_name] for entry in entries})

    @cached_property
    def _targets(self) -> dict[str, Target]:
        """The targets of all tensors, without memory."""
        return self._make_empty().weights()

    def _check_complete(self) -> None:
        """Raise ValueError if tensors are missing in the open update."""
        needed = (name for name, target in self._targets.items() if not target.is_optional)
        if missing := [name for name in needed if name not in self._arrived]:
            count = checks.counted(len(missing), "tensor")
            raise ValueError(f"the update is incomplete and stays open: {count} missing: {listed(missing)}")

    def _check_model(self, path: Path | None) -> None:
        """Raise ValueError if the model cannot take new weights, or if its config.json differs.

        The sizes of tensors do not show all differences. A folder may lack config.json. path: of a whole checkpoint.
        """
        if self._settings.model.implementation == TRANSFORMERS:
            raise ValueError("a model in transformers' code cannot take new weights; start an engine with them")
        if path is None or folder_files.is_gguf(path) or folder_files.is_gguf(Path(self._settings.model.path)):
            return
        old, new = read_config(Path(self._settings.model.path)), read_config(path)
        if old is None or new is None:
            return
        if old.get("model_type") != new.get("model_type") or _described(old) != _described(new):
            different = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))[:8]
            raise ValueError(
                f"{path / folder_files.CONFIG} describes another model than the config.json of this engine: "
                f"{', '.join(different) or 'values differ'}"
            )


def _reply_to(call: Callable[[Mapping[str, Argument]], str | None], control: Control) -> Reply:
    try:
        return Reply(control.call_id, True, data=call(control.arguments) or "")
    except RefusedError as refusal:
        return Reply(control.call_id, False, str(refusal), data=refusal.data)


def _update_of(arguments: Mapping[str, Argument]) -> int:
    return int(str(arguments.get("update") or 0))


def _opened(tensor: CudaTensor) -> Tensor:
    """Return a tensor [...] in the GPU memory of another process, without a copy. The process waits for the reply.

    Does what ``torch.multiprocessing`` does, which would need pickle.
    """
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device(),
        tensor.handle,
        tensor.num_bytes,
        tensor.storage_offset,
        tensor.counter_handle,
        tensor.counter_offset,
        tensor.event_handle,
        tensor.must_wait,
    )
    empty = torch.empty(0, dtype=DTYPES[tensor.dtype], device="cuda")
    return empty.set_(storage, tensor.offset, tensor.shape, tensor.strides)


def _described(config: dict[str, object]) -> object:
    """Return the config that the family reads, and whether the weights are not quantized."""
    plain, quantization = split_config(config)
    family = plugins.load("families", plugins.file_name(str(config.get("model_type"))))
    return family.read(plain), quantization is None
