"""Models, one file for each ``model_type`` of config.json; a file's ``PLUGIN`` is the model's class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine import plugins

if TYPE_CHECKING:
    from collections.abc import Mapping

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
