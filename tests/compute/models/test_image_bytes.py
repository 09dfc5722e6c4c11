"""Bytes with a table of values give the same bits as the image processors of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from aioengine.media.service import resizing
from aioengine.media.service.processors import with_bytes
from aioengine.media.service.resizing import DeviceResize
from aioengine.media.tokens._base import find_image_model
from aioengine.models._image_decoder import looked_up, resized
from aioengine.models._qwen_tower import cut
from tests.kit.image_models import FAMILIES, write_image_folder
from tests.kit.pictures import random_picture

SIZES = [(90, 50), (20, 20), (64, 97), (700, 520)]
"""(width, height)"""


def processors(model_type: str, options: dict[str, object], folder: Path) -> tuple[Any, Any]:
    family = FAMILIES[model_type]
    model = find_image_model(write_image_folder(folder, family._replace(processor={**family.processor, **options})))
    assert model is not None
    module, _, name = model.processor.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return kind.from_dict(dict(model.settings)), with_bytes(kind).from_dict(dict(model.settings))


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "smolvlm"])
@pytest.mark.parametrize(
    "options", [{}, {"do_normalize": False}, {"do_rescale": False}, {"image_mean": [0.5, 0.4, 0.1]}]
)
def test_looked_up_values_match_the_processor(model_type: str, options: dict[str, object], tmp_path: Path) -> None:
    plain, fast = processors(model_type, options, tmp_path)
    for size in SIZES:
        wanted = plain(random_picture(*size), return_tensors="np")
        for _ in range(2):
            actual = dict(fast(random_picture(*size), return_tensors="np"))
            assert ("pixels" in actual) == (not options.keys() & {"do_normalize", "do_rescale"})
            if "pixels" in actual:
                assert actual["pixels"].dtype == np.uint8
                values = looked_up(torch.tensor(actual["pixels"]), torch.tensor(actual["table"]))
                if model_type == "qwen2_vl":
                    values = cut(values, size=plain.patch_size, merge=plain.merge_size, frames=2)
                actual["pixel_values"] = values.numpy()
            assert all(np.array_equal(actual[key], wanted[key]) for key in wanted)
            assert actual["pixel_values"].dtype == wanted["pixel_values"].dtype


def test_padding_is_zero_after_normalization(tmp_path: Path) -> None:
    plain, fast = processors("llava", {"do_pad": True, "pad_size": {"height": 40, "width": 50}}, tmp_path)
    wanted, actual = (
        processor(random_picture(90, 50), return_tensors="np")["pixel_values"] for processor in (plain, fast)
    )
    assert actual.dtype == wanted.dtype
    assert np.array_equal(actual, wanted)


def test_resize_on_device_matches_pillow() -> None:
    """Sizes grow and shrink, with extreme aspect ratios."""
    rows_first = resizing.find_order()
    assert rows_first is not None
    draw = np.random.default_rng(1)
    sizes = [
        (1, 1, 28, 28),
        (2, 1, 1, 2),
        (3, 300, 28, 2800),
        (400, 4, 1120, 28),
        (300, 300, 150, 150),
        (90, 90, 90, 56),
    ]
    sizes += [tuple(draw.integers(1, most, 4).tolist()) for most in (4, 40, 400) for _ in range(40)]
    num_rows_first = 0
    for height, width, new_height, new_width in sizes:
        picture = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        is_first = rows_first(height, width, new_height, new_width)
        num_rows_first += is_first
        passes = {"row": resizing.taps(height, new_height), "column": resizing.taps(width, new_width)}
        arrays = {
            f"{name}_{part}": torch.tensor(value)
            for name, is_first_pass in passes.items()
            for part, value in is_first_pass._asdict().items()
        }
        actual = resized({"picture": torch.tensor(picture), **arrays}, rows_first=is_first)
        wanted = np.asarray(Image.fromarray(picture).resize((new_width, new_height), Image.Resampling.BICUBIC))
        assert np.array_equal(actual.permute(1, 2, 0).numpy(), wanted), (height, width, new_height, new_width)
    assert int(PIL.__version__.partition(".")[0]) < 13 or 0 < num_rows_first < len(sizes)


def device_resize(plain: Any) -> DeviceResize:
    rows_first = resizing.find_order()
    assert rows_first is not None
    smart_resize = importlib.import_module(type(plain).__module__).smart_resize
    return DeviceResize(plain, smart_resize, rows_first)


@pytest.mark.parametrize("options", [{}, {"do_normalize": False}, {"resample": 2}, {"do_resize": False}])
def test_late_resize_gives_same_values(options: dict[str, object], tmp_path: Path) -> None:
    plain, _ = processors("qwen2_vl", options, tmp_path)
    resize = device_resize(plain)
    is_late = not options.keys() & {"do_normalize", "resample"}
    for width, height in ((64, 64), (56, 80)) if "do_resize" in options else SIZES:
        actual = resize.arrays(height, width)
        assert (actual is not None) == (is_late and height * width < 64 * 64 * 4), "a large one is resized before"
        if actual is None:
            continue
        wanted = plain(random_picture(width, height), return_tensors="np")
        arrays = {name: torch.tensor(array) for name, array in actual.items()}
        arrays["picture"] = torch.tensor(np.asarray(random_picture(width, height)))
        values = looked_up(resized(arrays, rows_first=bool(actual["rows_first"])), arrays["table"])
        patches = cut(values, size=plain.patch_size, merge=plain.merge_size, frames=2).numpy()
        assert np.array_equal(patches, wanted["pixel_values"])
        assert np.array_equal(actual["image_grid_thw"], wanted["image_grid_thw"])
        assert resize.arrays(height, width) is actual, "it depends on the size alone"


def test_late_resize_refuses_sizes_that_the_processor_refuses(tmp_path: Path) -> None:
    plain, _ = processors("qwen2_vl", {}, tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="aspect ratio"):
            device_resize(plain).arrays(1, 300)


@pytest.mark.parametrize("options", [{}, {"do_normalize": False}])
def test_unresized_picture_must_consist_of_whole_patches(options: dict[str, object], tmp_path: Path) -> None:
    plain, fast = processors("qwen2_vl", {"do_resize": False, **options}, tmp_path)
    for width, height in ((90, 48), (48, 50), (3, 3)):
        with pytest.raises(ValueError, match="reshape"):
            plain(random_picture(width, height), return_tensors="np")
        with pytest.raises(ValueError, match=f"it has {width} x {height} pixels.* multiples of 8"):
            fast(random_picture(width, height), return_tensors="np")
    assert fast(random_picture(48, 40), return_tensors="np")["image_grid_thw"].tolist() == [[1, 10, 12]]


def test_unknown_pass_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "resize", lambda image, size, *_: Image.new("L", size))
    assert resizing.find_order() is None
