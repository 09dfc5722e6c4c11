"""Models, one file for each ``model_type`` of config.json; a file's ``PLUGIN`` is the model's class."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from aioengine import plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aioengine.families._config import Task
    from aioengine.models._base import Model, ModelClass, ModelOptions


def names() -> list[str]:
    """The model types that there is a file for."""
    return plugins.names("models")


def build(config: Mapping[str, object], options: ModelOptions) -> Model:
    """The model with room for its weights, which the caller fills in through ``weights()``.

    Raises:
        ValueError: the model type or a value of its config is not implemented; the message names it.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or plugins.file_name(model_type) not in names():
        message = f"model_type {model_type!r} in config.json is not implemented; what works: {', '.join(names())}"
        raise ValueError(message)
    model_class: ModelClass = plugins.load("models", plugins.file_name(model_type))
    return model_class(config, options)


class ForeignModel(Protocol):
    """A model folder that transformers' own code computes."""

    def num_bytes(self, options: ModelOptions) -> int:
        """Bytes of its parameters."""
        ...

    def load(self, options: ModelOptions) -> Model:
        """As ``build``."""
        ...


def foreign(folder: Path, task: Task, *, trust_remote_code: bool, has_weights: bool) -> ForeignModel:
    """Read config.json with transformers, whose import takes a second.

    Args:
        trust_remote_code: code in the folder may be run.
        has_weights: the weights are read from the folder.

    Raises:
        ValueError: transformers has no code for it, or code of the folder would have to be run.
    """
    module = importlib.import_module("aioengine.models._fallback")
    make = cast("Callable[..., ForeignModel]", module.TransformersFolder)
    return make(folder, task, trust_remote_code=trust_remote_code, has_weights=has_weights)
