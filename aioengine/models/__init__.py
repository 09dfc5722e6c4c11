"""Models by the ``model_type`` of config.json.

The family of a model type reads config.json. The type of its result decides between ``DecoderModel`` and
``EncoderModel``. A model that needs more has its own class here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from aioengine import plugins
from aioengine.families._config import DecoderConfig
from aioengine.families._encoders import EncoderConfig
from aioengine.models._base import Model, ModelOptions
from aioengine.models._decoder import DecoderModel
from aioengine.models._encoder import EncoderModel

ALIASES: Final = {
    "gemma3": "_image_decoder:Gemma3",
    "idefics3": "_image_decoder:Idefics3",
    "llava": "_image_decoder:ImageDecoder",
    "qwen2_5_vl": "_qwen_tower:QwenVision",
    "qwen2_vl": "_qwen_tower:QwenVision",
    "qwen3_vl": "_qwen_tower:QwenVision",
    "smolvlm": "_image_decoder:Idefics3",
}
"""Model type -> "file:class"."""


def build(config: Mapping[str, object], options: ModelOptions) -> Model:
    """Build the model of config.json. The caller loads its weights through ``weights()``.

    Raises ValueError if the model type, or a value of a field, is not implemented.
    """
    name = plugins.file_name(str(config.get("model_type")))
    if name in plugins.names("models"):
        model_class: Callable[[Mapping[str, object], ModelOptions], Model] = plugins.load("models", name)
        return model_class(config, options)
    model_config: DecoderConfig | EncoderConfig = plugins.load("families", name).read(config)
    if isinstance(model_config, EncoderConfig):
        return EncoderModel(model_config, options)
    return DecoderModel(model_config, options)
