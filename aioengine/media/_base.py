"""The interface of the plug-ins, and the files of a model folder that say how its images are prepared. No torch.

In a prompt, one placeholder token stands for each image. Once the image is prepared, its size is known, and the
placeholder is replaced by the tokens that the model was trained with: the placeholder again and again, once for each
position that gets features, and with some models other tokens between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from aioengine import checks, plugins
from aioengine.config import MediaConfig
from aioengine.model_files import folder_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

ConfigType = TypeVar("ConfigType", bound=Struct)

PROCESSORS: Final = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "Idefics3ImageProcessor": "idefics3",
    "LlavaImageProcessor": "llava",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "SiglipImageProcessor": "siglip",
    "SmolVLMImageProcessor": "smolvlm",
}
"""The image processors of transformers that are used, in their forms that need Pillow alone, and their modules."""

_CUTS: Final = "Qwen2VLImageProcessor"
"""The one that cuts pictures into patches itself."""

_PATCHES: Final = {
    "patch_size": ("patch_size", 14),
    "merge_size": ("spatial_merge_size", 2),
    "temporal_patch_size": ("temporal_patch_size", 2),
}
"""Its fields -> what the vision tower calls them, and their values where they are left out."""

_SIDES: Final = {
    "CLIPImageProcessor": ("do_center_crop", "crop_size"),
    "Gemma3ImageProcessor": ("do_resize", "size"),
    "LlavaImageProcessor": ("do_center_crop", "crop_size"),
    "SiglipImageProcessor": ("do_resize", "size"),
}
"""Those that bring all pictures to one size, the switch for it, and the field with the size."""

_USUAL_SIDE: Final = 224

_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_MAX_SIZE: Final = 1 << 16


class ImageShape(Struct, frozen=True, array_like=True, gc=False):
    """The size of an image once it is prepared.

    height, width: in pixels, of what the vision tower sees at once: the image, or each of its tiles.
    grid: (frames, height, width) in patches, where the processor gives it. tiles: (rows, columns) of them beside the
    whole image; (0, 0): it is not cut.
    """

    height: int
    width: int
    grid: tuple[int, int, int] = (0, 0, 0)
    tiles: tuple[int, int] = (0, 0)


class Expansion(NamedTuple):
    """The tokens of one image: ``texts[0]``, ``num_repeats`` placeholders, ``texts[1]``, as many again, and so on.

    The texts are special tokens and line breaks. Two empty ones: placeholders alone.
    """

    texts: tuple[str, ...]
    num_repeats: int

    @property
    def num_features(self) -> int:
        return (len(self.texts) - 1) * self.num_repeats


class ImageFamily(Protocol):
    """How a model's prompts hold images.

    Attributes:
        placeholder_id: the token that stands for an image in a prompt, and for each of its features.
        placeholder: how prompts write it, as errors name it.
        processor: the image processor of transformers for folders that name none.
        options: arguments of its calls, beside the images.
    """

    placeholder_id: int
    placeholder: ClassVar[str]
    processor: ClassVar[str]
    options: ClassVar[Mapping[str, bool]]

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        """From config.json. Raises ValueError for a value that is missing or not implemented; it is named."""
        ...

    def in_text(self, text: str) -> str:
        """The text of a prompt as it is tokenized."""
        ...

    def expansion(self, image: ImageShape) -> Expansion: ...


class ImageModel(NamedTuple):
    """The images of a model: its family, and how they are prepared.

    Attributes:
        processor: the image processor of transformers, "module:class". settings: its fields, from the model folder.
        limits: of the images that are taken.
    """

    family: ImageFamily
    processor: str
    settings: dict[str, object]
    limits: MediaConfig = MediaConfig()


def find_image_model(folder: Path) -> ImageModel | None:
    """The images of the model in a folder; None: it takes text alone. Raises ValueError as ``read_image_model``."""
    config = folder_files.read_object(folder / "config.json")
    name = plugins.file_name(str(config.get("model_type")))
    return read_image_model(folder, plugins.load("media", name), config) if name in plugins.names("media") else None


def read_image_model(folder: Path, family: type[ImageFamily], config: Mapping[str, object]) -> ImageModel:
    """From a model folder. ``config``: its config.json.

    Raises:
        ValueError: a file cannot be read, or names an image processor that is not used here.
    """
    settings = dict(_settings(folder))
    name = settings.get("image_processor_type") or family.processor
    plain = str(name).removesuffix("Fast").removesuffix("Pil")
    if plain not in PROCESSORS:
        raise ValueError(
            f"the images of {str(folder)!r} are prepared by {checks.shown(name)}, which is not supported; there are "
            f"{', '.join(PROCESSORS)}"
        )
    if plain == _CUTS:
        _check_patches(settings, config, folder)
    elif plain in _SIDES:
        _check_side(settings, config, folder, plain)
    place = PROCESSORS[plain]
    return ImageModel(
        family=family.read(config),
        processor=f"transformers.models.{place}.image_processing_pil_{place}:{plain}Pil",
        settings=settings,
    )


def _check_patches(settings: Mapping[str, object], config: Mapping[str, object], folder: Path) -> None:
    """Raise ValueError where the image processor would cut other patches than the vision tower reads."""
    tower = _tower(config)
    for name, (tower_name, usual) in _PATCHES.items():
        given = usual if settings.get(name) is None else settings[name]
        wanted = tower.get(tower_name)
        if wanted is not None and given != wanted:
            raise ValueError(
                f"the image processor of {str(folder)!r} has {name}={checks.shown(given)}, and the vision tower in its "
                f"config.json {tower_name}={checks.shown(wanted)}; copy {_FILES[0]} of the original model"
            )


def _check_side(settings: Mapping[str, object], config: Mapping[str, object], folder: Path, processor: str) -> None:
    """Raise ValueError where a processor of ``_SIDES`` would make pictures of another size than the tower reads."""
    switch, name = _SIDES[processor]
    wanted = _tower(config).get("image_size")
    given = _USUAL_SIDE if settings.get(name) is None else settings[name]
    sides = [given.get("height"), given.get("width")] if isinstance(given, dict) else given
    sides = cast("list[object]", sides) if isinstance(sides, list) else [sides]
    if wanted is not None and settings.get(switch) is not False and any(side not in (None, wanted) for side in sides):
        raise ValueError(
            f"the image processor of {str(folder)!r} has {name}={checks.shown(given)}, and the vision tower in its "
            f"config.json image_size={checks.shown(wanted)}; copy {_FILES[0]} of the original model"
        )


def _tower(config: Mapping[str, object]) -> Mapping[str, object]:
    vision = config.get("vision_config")
    return cast("Mapping[str, object]", vision) if isinstance(vision, dict) else {}


def _settings(folder: Path) -> Mapping[str, object]:
    """The fields of the image processor: a file of its own, or a part of that of the whole processor."""
    for name in _FILES:
        found = folder_files.read_object(folder / name)
        part = found.get("image_processor", found if name == _FILES[0] else None)
        if isinstance(part, dict) and part:
            return cast("dict[str, object]", part)
    raise ValueError(
        f"{str(folder)!r} has neither {' nor '.join(_FILES)}, which say how its images are prepared; "
        "copy the one of the original model"
    )


def decoded(config: Mapping[str, object], kind: type[ConfigType]) -> ConfigType:
    """The fields of config.json that a family reads. Raises ValueError, which names the wrong one."""
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from error


def size_of(name: str, value: int) -> int:
    """A size in config.json. Raises ValueError where it cannot be one."""
    if not 1 <= value <= _MAX_SIZE:
        raise ValueError(f"config.json: {name} must be from 1 to {_MAX_SIZE}, got {value}")
    return value
