"""Configs of models that read images, and the base class of their families. Torch-free.

Vision tower and projector are modules of transformers, which reads their fields of config.json itself. The families
read the text model, and the facts that the rest of the engine needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import msgspec

from aioengine import plugins
from aioengine.families._config import DecoderConfig, DecoderFamily, Family, Task
from aioengine.families._fields import decode_config, not_implemented

ImageToken = Annotated[int, msgspec.Meta(ge=0)]

TEXT_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
}
"""Model type -> defaults of fields that ``text_config`` omits in files on the hub; the defaults of transformers."""


class VisionConfig(DecoderConfig, frozen=True, kw_only=True):
    """The text model of a model that reads images.

    Attributes:
        image_token_id: the placeholder token. Image features replace its embedding.
        towers: prefixes of the tensors of vision tower and projector.
        num_axes: axes of a position: 1, or 3 for time, height and width.
        num_deepstack: number of first layers after which further image features are added (DeepStack).
        whole_image_tokens: tokens per image if they attend to each other in both directions, else 0.
    """

    image_token_id: int
    towers: tuple[str, ...]
    num_axes: int = 1
    num_deepstack: int = 0
    whole_image_tokens: int = 0


class Tower(msgspec.Struct, frozen=True):
    """The fields of ``vision_config`` that families read."""

    model_type: str = ""
    deepstack_visual_indexes: list[int] | None = None


class VisionFamily(Family, frozen=True, kw_only=True):
    """The fields of config.json that all families with images share.

    Raises ValueError for a value that is not implemented.

    Attributes:
        text_types, tower_types: supported model types of text model and vision tower.
        text_family: the family of the text model; "" for the family of its model type.
        text_defaults: defaults of fields of text_config.
        towers, renamed: see ``VisionConfig``.
    """

    text_types: ClassVar[tuple[str, ...]] = ()
    tower_types: ClassVar[tuple[str, ...]] = ()
    text_family: ClassVar[str] = ""
    text_defaults: ClassVar[dict[str, object]] = {}
    towers: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    tasks: ClassVar[Mapping[str, Task]] = {"ForConditionalGeneration": Task.GENERATE, "Model": Task.EMBED}

    text_config: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    vision_config: Tower = Tower()
    image_token_id: ImageToken | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self) -> None:
        if self.vision_config.model_type not in self.tower_types:
            not_implemented("vision_config.model_type", self.vision_config.model_type, ", ".join(self.tower_types))

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. Raises ValueError for a value that is not implemented."""
        return decode_config(config, cls).decoder()

    @property
    def placeholder_id(self) -> int | None:
        """The placeholder token of an image in prompts."""
        return self.image_token_id

    def text(self) -> DecoderConfig:
        """Return the text model, without the facts about images."""
        model_type = self.text_config.get("model_type", self.text_types[0])
        if not isinstance(model_type, str) or model_type not in self.text_types:
            not_implemented("text_config.model_type", model_type, ", ".join(self.text_types))
        defaults = {**TEXT_DEFAULTS.get(model_type, {}), **self.text_defaults}
        fields = {**defaults, **self.text_config, "model_type": model_type}
        fields["architectures"] = ["Model"] if self.task is Task.EMBED else None
        if self.tie_word_embeddings:
            fields["tie_word_embeddings"] = True
        family: type[DecoderFamily] = plugins.load("families", self.text_family or model_type)
        return family.read(fields)

    def decoder(self) -> DecoderConfig:
        """Return the text model with the facts about images."""
        return self.with_images(self.text())

    def with_images(self, text: DecoderConfig, **fields: object) -> VisionConfig:
        """Add the facts about images to the text model. ``fields``: further fields of ``VisionConfig``.

        Raises ValueError if the placeholder is not in the vocabulary.
        """
        if text.short_length:
            not_implemented("rope_parameters.rope_type", "longrope", "other types in a model that reads images")
        own = {"image_token_id": self.placeholder_id, "towers": self.towers, "renamed": self.renamed, **fields}
        config = msgspec.convert({**msgspec.structs.asdict(text), **own}, VisionConfig)
        if not 0 <= config.image_token_id < config.vocab_size:
            limit = f"an id below the vocabulary of {config.vocab_size}"
            not_implemented("image_token_id", config.image_token_id, limit)
        return config
