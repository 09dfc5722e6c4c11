"""Models by the ``model_type`` of config.json.

The family of a model type reads config.json. The class follows from the result: ``DecoderModel``, ``HybridDecoder`` or
``EncoderModel``. A model that needs more has a file here, named after its model type.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol, cast

from aioengine import plugins
from aioengine.families._encoders import EncoderConfig
from aioengine.models._decoder import DecoderModel
from aioengine.models._encoder import EncoderModel
from aioengine.models._hybrid import HybridDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aioengine.families._config import DecoderConfig, Task
    from aioengine.models._base import Model, ModelClass, ModelOptions

ALIASES: Final = {
    "llava": "_image_decoder:ImageDecoder",
    "qwen2_5_vl": "_qwen_decoder:QwenVision",
    "qwen2_vl": "_qwen_decoder:QwenVision",
    "qwen3_vl": "_qwen_decoder:QwenVision",
    "smolvlm": "idefics3:Idefics3",
}
"""Model types whose class is in another file, see ``plugins``."""


def names() -> list[str]:
    """The implemented model types, as names of files."""
    return sorted({*plugins.names("families"), *plugins.names("models")})


def build(config: Mapping[str, object], options: ModelOptions) -> Model:
    """The model with room for its weights, which the caller fills in through ``weights()``.

    Raises:
        ValueError: the model type or a value of its config is not implemented; the message names it.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or (name := plugins.file_name(model_type)) not in names():
        message = f"model_type {model_type!r} in config.json is not implemented; what works: {', '.join(names())}"
        raise ValueError(message)
    if name in plugins.names("models"):
        model_class: ModelClass = plugins.load("models", name)
        return model_class(config, options)
    found: DecoderConfig | EncoderConfig = plugins.load("families", name).read(config)
    if isinstance(found, EncoderConfig):
        return EncoderModel(found, options)
    return DecoderModel(found, options) if found.stateful is None else HybridDecoder(found, options)


class FallbackModel(Protocol):
    """A model folder that transformers' own code computes."""

    def num_bytes(self, options: ModelOptions) -> int:
        """Bytes of its parameters."""
        ...

    def load(self, options: ModelOptions) -> Model:
        """As ``build``."""
        ...


def fallback(folder: Path, task: Task, *, trust_remote_code: bool, has_weights: bool) -> FallbackModel:
    """Read config.json with transformers, whose import takes a second.

    Args:
        trust_remote_code: code in the folder may be run.
        has_weights: the weights are read from the folder.

    Raises:
        ValueError: transformers has no code for it, or code of the folder would have to be run.
    """
    module = importlib.import_module("aioengine.models._fallback")
    make = cast("Callable[..., FallbackModel]", module.TransformersFolder)
    return make(folder, task, trust_remote_code=trust_remote_code, has_weights=has_weights)
