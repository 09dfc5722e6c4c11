"""Configs of models that read images, and the base class of their families. Torch-free.

Vision tower and projector are modules of transformers, which reads their fields of config.json itself. The families
read the text model, and the facts that the rest of the engine needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, cast

from msgspec import Meta, Struct, convert, field
from msgspec.structs import asdict, replace

from aioengine import plugins
from aioengine.families._config import DecoderConfig, DecoderFamily, Family, Task, new_name
from aioengine.families._fields import decode_config, not_implemented

ImageToken = Annotated[int, Meta(ge=0)]
Layers = Annotated[int, Meta(ge=1, le=1024)]

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

    def is_in_tower(self, stored_name: str) -> bool:
        """Return whether a tensor in the checkpoint is a parameter of the vision tower or projector."""
        return new_name(stored_name, self.renamed).startswith(self.towers) and not stored_name.endswith("position_ids")


class Tower(Struct, frozen=True):
    """The fields of ``vision_config`` that families read. transformers builds all layers before it reads weights."""

    model_type: str = ""
    depth: Layers = 1
    num_hidden_layers: Layers = 1
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

    text_config: dict[str, object] = field(default_factory=dict[str, object])
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
        config = convert({**asdict(text), **own}, VisionConfig)
        if not 0 <= config.image_token_id < config.vocab_size:
            limit = f"an id below the vocabulary of {config.vocab_size}"
            not_implemented("image_token_id", config.image_token_id, limit)
        return config


class QwenFamily(VisionFamily, frozen=True, kw_only=True):
    """The base class of Qwen's families with images.

    Attributes:
        rope: default of the fields of the three axes in ``rope_parameters``.
        num_deepstack: default of ``VisionConfig.num_deepstack``.
        renamed: names since transformers 4.52. Older files have our names.
    """

    rope: ClassVar[dict[str, object]] = {"mrope_section": [16, 24, 24]}
    num_deepstack: ClassVar[int] = 0
    text_family = "qwen2"
    towers = ("visual.",)
    renamed = (("model.language_model.", "model."), ("model.visual.", "visual."))

    image_token_id: ImageToken = 151_655

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. In older files the fields of the text model are not in ``text_config``."""
        if config.get("text_config") is None:
            text = {name: value for name, value in config.items() if name not in ("vision_config", "architectures")}
            text["model_type"] = cls.text_types[0]
        else:
            text = dict(_part(config, "text_config"))
        name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
        rope = {**cls.rope, **_part(text, name)}
        for kind in ("type", "rope_type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
        return super().read({**config, "text_config": {**text, name: rope}})

    def decoder(self) -> DecoderConfig:
        text, layers = self.text(), self.vision_config.deepstack_visual_indexes
        rope, num_pairs = text.rope, text.head_size // 2
        if rope.rope_type == "dynamic":
            not_implemented("rope_parameters.rope_type", rope.rope_type, "default, linear, yarn or llama3")
        section = list(rope.mrope_section)
        if len(section) != 3 or min(section) < 0 or sum(section) != num_pairs:
            limit = f"three numbers that add up to {num_pairs}"
            not_implemented("rope_parameters.mrope_section", section, limit)
        num_deepstack = self.num_deepstack if layers is None else len(layers)
        return self.with_images(text, num_axes=3, num_deepstack=num_deepstack)


class Qwen2VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen2-VL: the text model is a Qwen2 with three-axis positions."""

    text_types = ("qwen2_vl_text",)
    tower_types = ("", "qwen2_vl", "qwen2_vl_vision")


class Qwen25VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen2.5-VL: the text model is a Qwen2 with three-axis positions."""

    text_types = ("qwen2_5_vl_text",)
    tower_types = ("", "qwen2_5_vl", "qwen2_5_vl_vision")


class Qwen3VLFamily(QwenFamily, frozen=True, kw_only=True):
    """Qwen3-VL, dense: the text model is a Qwen3 with three-axis positions, interleaved in each head."""

    rope: ClassVar[dict[str, object]] = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    num_deepstack: ClassVar[int] = 3
    text_family = "qwen3"
    text_types = ("qwen3_vl_text",)
    tower_types = ("", "qwen3_vl", "qwen3_vl_vision")


class LlavaFamily(VisionFamily, frozen=True, kw_only=True):
    """LLaVA.

    Attributes:
        renamed: names before transformers 4.52, since 4.52, and since 5.
        default_placeholder_id: the placeholder token of files that do not name it.
    """

    text_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    tower_types: ClassVar[tuple[str, ...]] = ("clip_vision_model", "siglip_vision_model")
    renamed = (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("model.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.", "vision_tower."),
        ("vision_tower.vision_model.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    )
    default_placeholder_id: ClassVar[int] = 32_000

    image_token_index: ImageToken | None = None
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    vision_feature_layer: int | list[int] = -2

    @property
    def placeholder_id(self) -> int:
        token_id = self.image_token_index if self.image_token_id is None else self.image_token_id
        return self.default_placeholder_id if token_id is None else token_id


TOWER: Final = "siglip_vision_model"


class Gemma3Family(LlavaFamily, frozen=True, kw_only=True):
    """Gemma 3 with images: a SigLIP tower, average pooling to a fixed number of tokens, and the Gemma 3 text model."""

    text_types = ("gemma3_text",)
    tower_types = (TOWER,)
    default_placeholder_id: ClassVar[int] = 262_144

    mm_tokens_per_image: Annotated[int, Meta(ge=1)] = 256

    @classmethod
    def read(cls, config: Mapping[str, object]) -> DecoderConfig:
        """Read config.json. ``tie_word_embeddings`` is a field of the whole model."""
        text, tied = _part(config, "text_config"), config.get("tie_word_embeddings", True)
        tower = {"model_type": TOWER, **_part(config, "vision_config")}
        return super().read({**config, "text_config": {**text, "tie_word_embeddings": tied}, "vision_config": tower})

    def decoder(self) -> DecoderConfig:
        return self.with_images(self.text(), whole_image_tokens=self.mm_tokens_per_image)


def _part(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = config.get(name) or {}
    if not isinstance(part, dict):
        not_implemented(name, part, "an object")
    return cast("dict[str, object]", part)


class Idefics3Family(VisionFamily, frozen=True, kw_only=True):
    """Idefics3 and SmolVLM without video: a SigLIP tower, pixel shuffle, and a Llama."""

    text_types = ("llama",)
    text_defaults: ClassVar[dict[str, object]] = {"rms_norm_eps": 1e-5}
    tower_types = ("", "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
    towers = ("vision_model.", "connector.")
    renamed = (
        ("model.text_model.", "model."),
        ("model.vision_model.", "vision_model."),
        ("model.connector.", "connector."),
    )

    image_token_id: ImageToken = 128_257


class Qwen35Family(VisionFamily, frozen=True, kw_only=True):
    """Qwen3.5: the checkpoint has a vision tower, but only the text model is served."""

    text_types = ("qwen3_5_text",)
    tower_types = ("", "qwen3_5", "qwen3_5_vision")

    def decoder(self) -> DecoderConfig:
        decoder = self.text()
        return replace(
            decoder, renamed=(("model.language_model.", "model."),), ignored=(*decoder.ignored, "model.visual.")
        )
