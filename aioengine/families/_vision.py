"""Models that read images beside text: a text model in config.json, and a vision tower. No torch.

The tower and what brings its outputs to the size of the text model are modules of transformers, which reads their part
of config.json. Here is what the text model and everything around it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import msgspec

from aioengine import plugins
from aioengine.families._config import DecoderConfig, DecoderFamily, Task, task_of
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
"""Fields of text models that files on the hub leave out, by model type: the values of transformers."""


class VisionConfig(DecoderConfig, frozen=True, kw_only=True):
    """The text model of a model that reads images.

    Attributes:
        image_token_id: the placeholder in prompts, whose embedding the features of an image replace.
        towers: prefixes of the names of the tensors that belong to no text model.
        num_axes: of positions, 1 or 3 (time, height, width).
        num_deepstack: layers behind which further features of an image are added.
        whole_image_tokens: tokens of an image where these attend to each other in both directions; 0: they do not.
    """

    image_token_id: int
    towers: tuple[str, ...]
    num_axes: int = 1
    num_deepstack: int = 0
    whole_image_tokens: int = 0


class Tower(msgspec.Struct, frozen=True):
    """The fields of ``vision_config`` that are read here."""

    model_type: str = ""
    deepstack_visual_indexes: list[int] | None = None


class VisionFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that the families have in common.

    Raises ValueError for a value that is not implemented.

    Attributes:
        text_types: model types of text models that are implemented. tower_types: those of vision towers.
        text_family: the family of the text model; "": that of its type. text_defaults: fields that files may leave out.
        towers, renamed: as in ``VisionConfig``.
    """

    text_types: ClassVar[tuple[str, ...]] = ()
    tower_types: ClassVar[tuple[str, ...]] = ()
    text_family: ClassVar[str] = ""
    text_defaults: ClassVar[dict[str, object]] = {}
    towers: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    tasks: ClassVar[Mapping[str, Task]] = {"ForConditionalGeneration": Task.GENERATE, "Model": Task.EMBED}

    architectures: list[str] | None = None
    text_config: dict[str, object] = {}
    vision_config: Tower = Tower()
    image_token_id: ImageToken | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self) -> None:
        if self.vision_config.model_type not in self.tower_types:
            not_implemented("vision_config.model_type", self.vision_config.model_type, ", ".join(self.tower_types))

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """The text model that config.json describes. Raises ValueError for a value that is not implemented."""
        return decode_config(config, cls).decoder()

    @property
    def placeholder_id(self) -> int | None:
        """The token that stands for an image in prompts."""
        return self.image_token_id

    def text(self) -> DecoderConfig:
        """The decoder that ``text_config`` describes."""
        model_type = self.text_config.get("model_type", self.text_types[0])
        if not isinstance(model_type, str) or model_type not in self.text_types:
            not_implemented("text_config.model_type", model_type, ", ".join(self.text_types))
        is_embedder = task_of(self.architectures, self.tasks) is Task.EMBED
        defaults = {**TEXT_DEFAULTS.get(model_type, {}), **self.text_defaults}
        fields = {**defaults, **self.text_config, "model_type": model_type}
        fields["architectures"] = ["Model"] if is_embedder else None
        if self.tie_word_embeddings:
            fields["tie_word_embeddings"] = True
        family: type[DecoderFamily] = plugins.load("families", self.text_family or model_type)
        return family.read(fields)

    def decoder(self) -> DecoderConfig:
        """The text model with what ``VisionConfig`` adds."""
        return self.with_images(self.text())

    def with_images(self, text: DecoderConfig, **fields: object) -> VisionConfig:
        """The text model with what ``VisionConfig`` adds; ``fields``: those that have other values than by default.

        Raises:
            ValueError: the placeholder is not in the vocabulary.
        """
        if text.short_length:
            not_implemented("rope_parameters.rope_type", "longrope", "other types, in a model that reads images")
        own = {"image_token_id": self.placeholder_id, "towers": self.towers, "renamed": self.renamed, **fields}
        config = msgspec.convert({**msgspec.structs.asdict(text), **own}, VisionConfig)
        if not 0 <= config.image_token_id < config.vocab_size:
            limit = f"an id below the vocabulary of {config.vocab_size}"
            not_implemented("image_token_id", config.image_token_id, limit)
        return config
