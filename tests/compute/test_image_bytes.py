"""Images as bytes with a table have the values, bit by bit, that the image processors of transformers give."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aioengine.media._base import find_image_model
from aioengine.models._image_decoder import looked_up
from aioengine.models._qwen_tower import cut
from aioengine.processes.image_arrays import faster
from tests.kit.image_models import FAMILIES, write_image_folder

SIZES = [(90, 50), (20, 20), (64, 97), (700, 520)]
"""(width, height)"""


def picture(width: int, height: int) -> Image.Image:
    draw = np.random.default_rng(width * height)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def processors(model_type: str, options: dict[str, object], folder: Path) -> tuple[Any, Any]:
    family = FAMILIES[model_type]
    model = find_image_model(write_image_folder(folder, family._replace(processor={**family.processor, **options})))
    assert model is not None
    module, _, name = model.processor.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return kind.from_dict(dict(model.settings)), faster(kind).from_dict(dict(model.settings))


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", "smolvlm"])
@pytest.mark.parametrize(
    "options", [{}, {"do_normalize": False}, {"do_rescale": False}, {"image_mean": [0.5, 0.4, 0.1]}]
)
def test_values_have_the_bits_of_arithmetic(model_type: str, options: dict[str, object], tmp_path: Path) -> None:
    plain, fast = processors(model_type, options, tmp_path)
    for size in SIZES:
        wanted = plain(picture(*size), return_tensors="np")
        for _ in range(2):
            found = dict(fast(picture(*size), return_tensors="np"))
            assert ("pixels" in found) == (not options.keys() & {"do_normalize", "do_rescale"})
            if "pixels" in found:
                assert found["pixels"].dtype == np.uint8
                values = looked_up(torch.tensor(found["pixels"]), torch.tensor(found["table"]))
                if model_type == "qwen2_vl":
                    values = cut(values, size=plain.patch_size, merge=plain.merge_size, frames=2)
                found["pixel_values"] = values.numpy()
            assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
            assert found["pixel_values"].dtype == wanted["pixel_values"].dtype


def test_padding_is_made_of_zeros_behind_the_normalization(tmp_path: Path) -> None:
    plain, fast = processors("llava", {"do_pad": True, "pad_size": {"height": 40, "width": 50}}, tmp_path)
    wanted, found = (each(picture(90, 50), return_tensors="np")["pixel_values"] for each in (plain, fast))
    assert found.dtype == wanted.dtype
    assert np.array_equal(found, wanted)
