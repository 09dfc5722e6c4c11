"""Decoder models, one file for each ``model_type`` of config.json; a file's ``PLUGIN`` is the model's class."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import Model, ModelClass, ModelOptions


def names() -> list[str]:
    """The model types that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def find(config: Mapping[str, object]) -> ModelClass:
    """The model class for a decoded config.json.

    Raises:
        ValueError: no file for this ``model_type``.
    """
    model_type = config.get("model_type")
    if model_type not in names():
        message = f"model_type {model_type!r} in config.json is not implemented; what works: {', '.join(names())}"
        raise ValueError(message)
    module = importlib.import_module(f"{__name__}.{model_type}")
    return cast("ModelClass", module.PLUGIN)


def build(config: Mapping[str, object], options: ModelOptions) -> Model:
    """The model with room for its weights, which the caller fills in through ``weights()``.

    Raises:
        ValueError: the model or a value of its config is not implemented; the message names it.
    """
    return find(config)(config, options)
