"""Replaces the weights of a running engine between two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from aioengine import plugins
from aioengine.layers.linear import Linear
from aioengine.model_files import folder_files
from aioengine.model_files.checkpoint import file_states
from aioengine.model_files.quantization import read_config, split_config
from aioengine.protocol.messages import Control, Reply
from aioengine.protocol.weight_messages import CHECK_WEIGHTS, LOAD_WEIGHTS
from aioengine.runner import weights
from aioengine.runner.weight_reading import check_all
from aioengine.settings.config import TRANSFORMERS, LoadedWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.layers.layer import Layer, Target
    from aioengine.model_files.checkpoint import Entry
    from aioengine.models._base import Model
    from aioengine.settings.config import ModelSettings

    Facts = dict[str, str | int | float | bool]


class WeightsBrokenError(BaseException):
    """New weights could not be loaded completely.

    It is no ``Exception``, because the old weights are lost: the process ends, and the next one starts with the new
    weights.
    """


class WeightLoader:
    """Checks and loads new weights of a model.

    Attributes:
        controls: see ``scheduler.runner.Runner``.
    """

    def __init__(
        self,
        model: Model,
        settings: ModelSettings,
        facts: Facts,
        *,
        make_empty: Callable[[], Model],
        on_loaded: Callable[[], None],
    ) -> None:
        """facts: of the runner; ``weight_version`` and ``num_weight_loads`` are kept in them.
        make_empty: returns the same model on the device "meta". on_loaded: called after the weights have changed.
        """
        self.controls: dict[str, Callable[[Control], Reply]] = {CHECK_WEIGHTS: self._check, LOAD_WEIGHTS: self._load}
        self._model = model
        self._settings = settings
        self._facts = facts
        self._make_empty = make_empty
        self._on_loaded = on_loaded
        self._targets: dict[str, Target] | None = None
        self._note(settings.weights)

    def _note(self, loaded: LoadedWeights) -> None:
        self._facts |= {"weight_version": loaded.version, "num_weight_loads": loaded.number}

    def _check(self, control: Control) -> Reply:
        """Read all of the new weights, and check them. The data of the reply are the digests of the files."""
        path = Path(str(control.arguments["path"]))
        try:
            self._check_model(path)
            entries = self._entries(path)
            files = file_states(entry.path for entry in entries)
            check_all(entries, self._empty_targets())
        except ValueError as error:
            return Reply(control.call_id, False, str(error))
        return Reply(control.call_id, True, data=json.dumps(files))

    @torch.no_grad()
    def _load(self, control: Control) -> Reply:
        """Replace the weights, in place where the kernels read them as loaded."""
        loaded = msgspec.json.decode(str(control.arguments["weights"]), type=LoadedWeights)
        if loaded.number == self._facts["num_weight_loads"]:
            return Reply(control.call_id, True)  # the process has started with them, or the call arrived twice
        path = Path(str(control.arguments["path"]))
        try:
            entries = self._entries(path)
            self._model.open_for_loading("", {entry.name.rpartition(".")[0] for entry in entries})
            weights.read(entries, self._model.weights(), lambda done, total: None)
            self._model.finish_loading()
        except Exception as error:
            raise WeightsBrokenError(f"new weights of {path} could not be loaded: {error}") from error
        self._note(loaded)
        self._on_loaded()
        return Reply(control.call_id, True)

    def _entries(self, path: Path) -> list[Entry]:
        return weights.checked_entries(self._model, path, self._empty_targets())

    def _empty_targets(self) -> dict[str, Target]:
        """Return the targets of all tensors, without memory."""
        if self._targets is None:
            self._targets = self._make_empty().weights()
        return self._targets

    def _check_model(self, path: Path) -> None:
        """Raise ValueError if the model cannot take new weights, or if its config.json differs.

        The sizes of tensors do not show all differences. A folder may lack config.json.
        """
        if self._settings.implementation == TRANSFORMERS:
            raise ValueError("a model in transformers' code cannot take new weights; start an engine with them")
        if (layer := _fixed_layer(self._model)) is not None:
            raise ValueError(f"the layer {layer} is quantized, and its weights on a GPU cannot be replaced")
        if folder_files.is_gguf(path) or folder_files.is_gguf(Path(self._settings.path)):
            return
        old, new = read_config(Path(self._settings.path)), read_config(path)
        if old is None or new is None:
            return
        if old.get("model_type") != new.get("model_type") or _described(old) != _described(new):
            raise ValueError(
                f"{path / folder_files.CONFIG} describes another model than the config.json of this engine: "
                f"{', '.join(_differences(old, new)) or 'values differ'}"
            )


def _described(config: dict[str, object]) -> object:
    """Return what the family reads from config.json, and its quantization."""
    plain, quantization = split_config(config)
    family = plugins.load("families", plugins.file_name(str(config.get("model_type"))))
    return family.read(plain), quantization is None


def _differences(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Return the names of values that differ."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))[:8]


def _fixed_layer(layer: Layer) -> str | None:
    """Return the name of a linear layer on a GPU whose weights would get other addresses, which CUDA graphs contain."""
    if isinstance(layer, Linear) and not layer.is_replaceable:
        return layer.name
    parts = (_fixed_layer(part) for _, part in layer.parts if part is not None)
    return next((name for name in parts if name is not None), None)
