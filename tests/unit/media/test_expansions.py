"""Prompts with images expand to the tokens of transformers' processors."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioengine import plugins
from aioengine.families._fields import decode
from aioengine.media.placeholders import check_count, image_ids, placed
from aioengine.media.tokens._base import ImageFamily, ImageModel, ImageShape, find_image_model
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.image_models import FAMILIES, Family, token_id, write_image_folder
from tests.kit.pictures import random_picture

SIZES = [(90, 50), (20, 20), (64, 97)]
"""(width, height)"""


def image_model(folder: Path) -> ImageModel:
    model = find_image_model(folder)
    assert model is not None
    return model


def read(model_type: str, config: dict[str, object]) -> ImageFamily:
    return decode(config, plugins.load("media/tokens", model_type), "config.json")


def image_processor(model: ImageModel) -> Any:
    module, _, name = model.processor.partition(":")
    return getattr(importlib.import_module(module), name).from_dict(dict(model.settings))


def reference(family: Family, model: ImageModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the processor of transformers without its video part, which needs more packages."""
    import transformers
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.processing_utils import ProcessorMixin

    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    names = ("boi", "<start_of_image>"), ("image", "<image_soft_token>"), ("eoi", "<end_of_image>")
    for name, text in names if family.model_type == "gemma3" else ():
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", token_id(text))
    names = {
        "llava": "LlavaProcessor",
        "gemma3": "Gemma3Processor",
        "qwen2_vl": "Qwen2VLProcessor",
        "qwen2_5_vl": "Qwen2_5_VLProcessor",
        "qwen3_vl": "Qwen3VLProcessor",
        "idefics3": "Idefics3Processor",
        "smolvlm": "SmolVLMProcessor",
    }
    more = {
        "llava": {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "gemma3": {"image_seq_length": 4},
        "idefics3": {"image_seq_len": 4},
        "smolvlm": {"image_seq_len": 4, "video_processor": None},
    }.get(family.model_type, {"video_processor": None})
    return getattr(transformers, names[family.model_type])(
        image_processor=image_processor(model), tokenizer=tokenizer, **more
    )


def shape_of(model: ImageModel, image: Image.Image) -> ImageShape:
    result = image_processor(model)(image, **dict(model.family.options))
    height, width = np.asarray(result["pixel_values"]).shape[-2:]
    frames, rows, columns = map(int, result["image_grid_thw"][0]) if "image_grid_thw" in result else (0, 0, 0)
    tiles = (result["rows"][0][0], result["cols"][0][0]) if "rows" in result else (0, 0)
    return ImageShape(height, width, (frames, rows, columns), tiles)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_expanded_ids_match_transformers(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_image_folder(tmp_path, family)
    model = image_model(folder)
    images = [random_picture(*size) for size in SIZES]
    text = f"USER: {family.prompt}\nand {family.prompt}{family.prompt} are? ASSISTANT:"
    expected = reference(family, model, folder, monkeypatch)(images=images, text=[text])["input_ids"][0]
    tokenizer, rules = Tokenizer(folder), model.family
    tokens = [
        image_ids(rules.expansion(shape_of(model, image)), model.placeholder_id, tokenizer.encode) for image in images
    ]
    ids, starts = placed(tokenizer.encode(rules.in_text(text)), model.placeholder_id, tokens)
    assert ids == list(expected)
    for start, image in zip(starts, tokens, strict=True):
        assert ids[start : start + len(image.token_ids)] == image.token_ids
        assert image.token_ids.count(model.placeholder_id) == image.num_features
    assert placed(ids, model.placeholder_id, tokens) == (ids, starts), "ids that have all tokens already"


def test_llava_1_5_has_576_features_at_336_pixels() -> None:
    vision = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    for strategy, expected in (("default", 576), ("full", 577)):
        config = {"vision_config": vision, "vision_feature_select_strategy": strategy}
        assert read("llava", config).expansion(ImageShape(336, 336)).num_features == expected


@pytest.mark.parametrize(
    ("model_type", "config", "words"),
    [
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ("llava", {"vision_feature_select_strategy": "odd"}, "odd"),
        ("qwen2_vl", {"vision_config": {"spatial_merge_size": 0}}, ">= 1.*spatial_merge_size"),
        ("idefics3", {"scale_factor": "two"}, "scale_factor"),
    ],
)
def test_unsupported_config_is_refused_by_name(model_type: str, config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(model_type, config)


def test_unknown_processor_is_refused_by_name(tmp_path: Path) -> None:
    odd = FAMILIES["llava"]._replace(processor={"image_processor_type": "OddImageProcessor"})
    folder = write_image_folder(tmp_path, odd)
    with pytest.raises(ValueError, match="'OddImageProcessor', which is not supported; allowed: CLIPImageProcessor"):
        image_model(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"neither preprocessor_config.json nor processor_config.json"):
        image_model(folder)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": FAMILIES["llava"].processor}))
    assert image_model(folder).processor.endswith(":CLIPImageProcessorPil")


def test_mismatched_number_of_images_is_reported() -> None:
    tokens = [image_ids(read("qwen2_vl", {}).expansion(ImageShape(8, 8, (1, 4, 4))), 9, None)] * 2
    for ids, count in (([1, 9, 2], 1), ([1, 9, 9, 9], 3), ([1], 0)):
        with pytest.raises(ValueError, match=rf"{count} image placeholders? \(token id 9\) for 2 images.*\(or 8, "):
            placed(ids, 9, tokens)
    with pytest.raises(ValueError, match="has 1 image placeholder .* for 0 images"):
        check_count([9], 9, 0)
    check_count([1], 9, 0)


def test_expansion_contains_all_tokens_of_an_image() -> None:
    around = token_id("<fake_token_around_image>")
    family = read("idefics3", {"vision_config": {"patch_size": 8}})
    whole = image_ids(family.expansion(ImageShape(32, 32)), 9, lambda text: [around] * (1 + text.count("global")))
    assert placed([1, *whole.token_ids, 2], 9, [whole])[1] == [1]
    with pytest.raises(ValueError, match="without its other tokens"):
        placed([1, 9, 9, 9, 9, 2], 9, [whole])
    with pytest.raises(ValueError, match="need its tokenizer"):
        image_ids(family.expansion(ImageShape(32, 32)), 9, None)
