"""The training of the tiny vision model: its pictures, and two steps that write a complete folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import ImageColor

from benchmarks.train_demo_vision_model import training
from benchmarks.train_demo_vision_model.pictures import COLOURS, FORMS, PLACES, Shape, draw, questions, random_shapes
from tests.kit.source import ROOT


def test_two_steps_write_a_complete_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = training.make_tokenizer()
    processor = training.make_processor(tokenizer)
    model = training.make_model(tokenizer)
    training.train(model, processor, num_steps=2, num_rows=2)
    training.save(model, processor, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llava", "bfloat16")
    assert config["image_token_index"] == tokenizer.convert_tokens_to_ids("<image>")
    for name in ("tokenizer.json", "model.safetensors", "processor_config.json", "preprocessor_config.json"):
        assert (tmp_path / name).is_file()
    picture = draw([Shape("red", "circle", 0)])
    inputs = processor(images=picture, text="<image>x", return_tensors="pt")
    assert (inputs["input_ids"] == config["image_token_index"]).sum() == config["image_seq_length"] == 9


def test_batches_depend_only_on_the_seed_and_have_labels_for_answers_only() -> None:
    processor = training.make_processor(training.make_tokenizer())
    batch = training.make_batch(processor, Random(3), 4)
    again = training.make_batch(processor, Random(3), 4)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert batch["pixel_values"].shape == (4, 3, 48, 48)
    learned = batch["input_ids"][batch["labels"] >= 0]
    assert torch.equal(learned, batch["labels"][batch["labels"] >= 0])
    assert "<|im_end|>" in processor.tokenizer.decode(learned)
    assert "<image>" not in processor.tokenizer.decode(learned)


@pytest.mark.parametrize("form", FORMS)
def test_shape_has_its_place_and_colour(form: str) -> None:
    for place in range(len(PLACES)):
        pixels = np.asarray(draw([Shape("blue", form, place)], 90))
        assert tuple(pixels[45, 30 * place + 15]) == ImageColor.getrgb(COLOURS["blue"])
        assert (pixels[:, : 30 * place] == 255).all()
        assert (pixels[:, 30 * (place + 1) :] == 255).all()


def test_answers_describe_their_pictures() -> None:
    random = Random(0)
    asked: set[str] = set()
    for _ in range(200):
        shapes = random_shapes(random)
        for question, answer in questions(shapes, random):
            asked.add(question.split()[0])
            if question.startswith("Is anything"):
                assert (answer == "Yes.") == any(shape.colour in question for shape in shapes)
            elif (place := question.removeprefix("What is ").removesuffix("?")) in PLACES:
                results = [str(shape).capitalize() for shape in shapes if PLACES[shape.place] == place]
                assert answer == f"{results[0] if results else 'Nothing'}."
    assert asked == {"What", "How", "Is"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trained_model_describes_the_drawn_shapes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "11_images.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    *trained, counted, seen, placed, yellow = done.stdout.splitlines()
    num_right, num_asked = map(int, re.findall(r"\d+", trained[-1]))
    assert num_right > 0.9 * num_asked
    assert counted == "['One.', 'Two.']"
    assert seen.startswith("What is in the picture? A blue square and a green triangle. [")
    assert placed.startswith("What is on the right? A green triangle. [")
    assert yellow.startswith("Is anything yellow? No. [")
