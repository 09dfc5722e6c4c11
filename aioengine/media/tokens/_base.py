"""The interface of the plug-ins, and the settings of image processors in model folders. Torch-free.

A prompt has one placeholder token per image. When the image is prepared and its size is known, the placeholder expands
to the tokens that the model was trained with: one placeholder per feature, and in some models other tokens in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, NamedTuple, cast

from msgspec import Meta, Struct

from aioengine import plugins
from aioengine.api import checks
from aioengine.families._fields import decode
from aioengine.families._vision import VisionConfig
from aioengine.model_files import folder_files
from aioengine.settings.config import MediaConfig

PROCESSORS: Final = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaImageProcessor": "llava",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Supported image processors of transformers -> their module. The variants that need only Pillow are used."""

_FILES: Final = ("preprocessor_config.json", "processor_config.json")

Size = Annotated[int, Meta(ge=1, le=1 << 16)]


class ImageShape(Struct, frozen=True, array_like=True, gc=False):
    """The size of a prepared image.

    Attributes:
        height, width: in pixels, of the input of the vision tower: the image, or one tile.
        grid: (frames, height, width) in patches, if the processor returns it.
        tiles: (rows, columns) of tiles, in addition to the unsplit image; (0, 0) if there are no tiles.
    """

    height: int
    width: int
    grid: tuple[int, int, int] = (0, 0, 0)
    tiles: tuple[int, int] = (0, 0)


class Expansion(NamedTuple):
    """The tokens of one image: the texts, with ``num_repeats`` placeholders between each two.

    Texts are special tokens and line breaks. Two empty texts mean placeholders only.
    """

    texts: tuple[str, ...]
    num_repeats: int

    @property
    def num_features(self) -> int:
        return (len(self.texts) - 1) * self.num_repeats


class ImageFamily(Struct, frozen=True, kw_only=True):
    """How prompts of a model contain images. Its fields are read from config.json.

    Attributes:
        placeholder: the text that a prompt has for each image, for error messages.
        processor: the default image processor of transformers.
        options: further arguments of its calls, by name.
    """

    placeholder: ClassVar[str]
    processor: ClassVar[str]
    options: ClassVar[tuple[tuple[str, bool], ...]] = ()

    def in_text(self, text: str) -> str:
        """Return the text of a prompt for the tokenizer."""
        return text

    def expansion(self, image: ImageShape) -> Expansion:
        raise NotImplementedError


class ImageModel(NamedTuple):
    """The family of a model with images, and its image processor.

    Attributes:
        placeholder_id: the placeholder token.
        processor: the image processor of transformers, "module:class".
        settings: its fields, from the model folder.
        limits: limits of accepted images.
    """

    family: ImageFamily
    placeholder_id: int
    processor: str
    settings: dict[str, object]
    limits: MediaConfig = MediaConfig()


def find_image_model(folder: Path) -> ImageModel | None:
    """Return the ``ImageModel`` of a folder; None for text-only models.

    Raises ValueError for a value that is not supported, or if a file cannot be read.
    """
    config = folder_files.read_object(folder / "config.json")
    model_type = plugins.file_name(str(config.get("model_type")))
    if model_type not in plugins.names("media/tokens"):
        return None
    family: ImageFamily = decode(config, plugins.load("media/tokens", model_type), "config.json")
    vision: VisionConfig = plugins.load("families", model_type).read(config)
    settings = dict(_settings(folder))
    name = settings.get("image_processor_type") or family.processor
    plain = str(name).removesuffix("Fast").removesuffix("Pil")
    if plain not in PROCESSORS:
        allowed = f"allowed: {', '.join(PROCESSORS)}"
        raise ValueError(f"{str(folder)!r} needs {checks.shown(name)}, which is not supported; {allowed}")
    module = PROCESSORS[plain]
    return ImageModel(
        family,
        vision.image_token_id,
        processor=f"transformers.models.{module}.image_processing_pil_{module}:{plain}Pil",
        settings=settings,
    )


def _settings(folder: Path) -> Mapping[str, object]:
    """Return the fields of the image processor, from its own file or the file of the joint processor."""
    for name in _FILES:
        fields = folder_files.read_object(folder / name)
        part = fields.get("image_processor", fields if name == _FILES[0] else None)
        if isinstance(part, dict) and part:
            return cast("dict[str, object]", part)
    raise ValueError(f"{str(folder)!r} has neither {' nor '.join(_FILES)}; copy the one of the original model")
