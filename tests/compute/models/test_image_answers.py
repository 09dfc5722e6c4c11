"""Answers of an engine about images match transformers with its own image processor."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from aioengine import Engine
from aioengine.cli import commands
from aioengine.media.tokens._base import find_image_model
from tests.kit.image_models import FAMILIES, add_image_files
from tests.kit.pictures import file_of
from tests.kit.tiny_sizes import VOCAB_SIZE
from tests.kit.vision_models import GREEDY, IMAGE, clear_tokens, save_vision_model

pytestmark = pytest.mark.process
SHORT = {"max_new_tokens": 6, "temperature": 0, "logit_bias": {str(IMAGE): -100}, "ignore_eos": True}


def drawing(seed: int, size: tuple[int, int] = (90, 60)) -> Image.Image:
    draw = np.random.default_rng(seed)
    image = Image.new("RGB", size, tuple(map(int, draw.integers(0, 256, 3))))
    for _ in range(5):
        x, y, radius = (int(draw.integers(0, limit)) for limit in (*size, 30))
        ImageDraw.Draw(image).ellipse((x, y, x + radius, y + radius), fill=tuple(map(int, draw.integers(0, 256, 3))))
    return image


def arrays_of(folder: Path, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the output of the image processor of transformers for all images."""
    model = find_image_model(folder)
    assert model is not None
    module, _, name = model.processor.partition(":")
    arrays = getattr(importlib.import_module(module), name).from_dict(dict(model.settings))(images, return_tensors="pt")
    return dict(arrays)


def inputs_of(folder: Path, images: list[Image.Image], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of the transformers model, without the token ids."""
    arrays = arrays_of(folder, images)
    if "image_grid_thw" in arrays:
        arrays["mm_token_type_ids"] = (ids == IMAGE).long()
    if arrays.pop("num_crops", None) is not None:
        arrays["token_type_ids"] = (ids == IMAGE).long()
    return arrays


@torch.inference_mode()
def check(theirs: Any, folder: Path, images: list[Image.Image], answer: Any) -> None:
    ids = torch.tensor([answer["prompt_token_ids"] + answer["output_ids"]])
    logits = theirs(input_ids=ids, use_cache=False, **inputs_of(folder, images, ids)).logits[0]
    assert answer["output_ids"] == clear_tokens(logits, answer["output_ids"])
    assert answer["meta_info"]["image_tokens"] == answer["prompt_token_ids"].count(IMAGE)
    assert GREEDY.temperature == 0


def made(folder: Path, model_type: str) -> Any:
    theirs = save_vision_model(model_type, folder)
    add_image_files(folder, model_type, IMAGE, VOCAB_SIZE)
    return theirs


class Served(NamedTuple):
    """An engine, the folder of its model, and transformers' own model."""

    llm: Engine
    folder: Path
    theirs: Any
    model_type: str

    @property
    def mark(self) -> str:
        """Return the placeholder of an image in a prompt."""
        return FAMILIES[self.model_type].prompt

    def check(self, images: list[Image.Image], answer: Any) -> None:
        check(self.theirs, self.folder, images, answer)

    def kill_scheduler(self) -> None:
        [scheduler] = [process for process in self.llm.health()["processes"] if process["role"] == "scheduler"]
        os.kill(scheduler["pid"], signal.SIGKILL)


DEFAULT = "qwen2_5_vl"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == DEFAULT else pytest.mark.slow) for name in FAMILIES],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine shared by the tests of a model type, because its start takes most of the time."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = made(folder, request.param)
    with Engine(folder, device="cpu", context_length=256, max_images_per_prompt=2) as llm:
        yield Served(llm, folder, theirs, request.param)


def test_answers_match_transformers(served: Served) -> None:
    one, two, mark = drawing(1), drawing(2, (50, 70)), served.mark
    images = [file_of(one), two]
    answer = served.llm.generate(f"see {mark} or {mark}?", SHORT, image_data=images, return_prompt_token_ids=True)
    served.check([one, two], answer)
    messages = [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "what?"}]}]
    served.check([one], served.llm.chat(messages, SHORT, return_prompt_token_ids=True))


def test_batches_prefix_hits_and_samples_match(served: Served) -> None:
    llm, one, two, mark = served.llm, drawing(3), drawing(4, (30, 80)), served.mark
    prompts = [f"a {mark}", "text", f"b {mark} {mark}"]
    given = [file_of(one), None, [file_of(two), file_of(one)]]
    outs: Any = llm.generate(prompts, SHORT, image_data=given, return_prompt_token_ids=True)
    served.check([one], outs[0])
    served.check([two, one], outs[2])
    assert "image_tokens" not in outs[1]["meta_info"]
    again = llm.generate(f"a {mark} and?", SHORT, image_data=file_of(one), return_prompt_token_ids=True)
    served.check([one], again)
    assert again["meta_info"]["cached_tokens"] >= 16, "the image is in the prefix cache"
    other = llm.generate(f"a {mark} and?", SHORT, image_data=file_of(two), return_prompt_token_ids=True)
    served.check([two], other)
    several: Any = llm.generate(
        f"d {mark}", {**SHORT, "n": 2}, image_data=file_of(two), return_prompt_token_ids=True, return_logprob=True
    )
    for answer in several:
        served.check([two], answer)
        assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


@pytest.mark.slow
def test_sessions_and_streams_continue_after_scheduler_is_killed(served: Served) -> None:
    check_session(served)


def check_session(served: Served) -> None:
    """Check turns about pictures of earlier turns, also after the scheduler with their pages was killed. A concurrent
    stream has the text of the complete answer.
    """
    llm, one, two, mark = served.llm, drawing(5), drawing(6, (30, 80)), served.mark
    sid = llm.open_session()

    def turn(text: str, before: Any, image: object = None) -> Any:
        rid = None if before is None else before["meta_info"]["id"]
        params = {"id": sid, "rid": rid}
        return llm.generate(text, SHORT, image_data=image, session_params=params, return_prompt_token_ids=True)

    first = turn(f"see {mark}.", None, file_of(one))
    second = turn(" and?", first)
    served.check([one], second)
    third = turn(f" or {mark}", second, two)
    served.check([one, two], third)
    assert third["meta_info"]["cached_tokens"] >= 16

    prompt, long = f"c {mark}", {**SHORT, "max_new_tokens": 100}
    whole, texts = llm.generate(prompt, long, image_data=one), list[str]()
    num_restarts = llm.stats()["num_restarts"]
    for chunk in llm.generate(prompt, long, image_data=one, stream=True):
        if not texts:
            served.kill_scheduler()
        texts.append(chunk["text"])
    assert "".join(texts) == whole["text"]
    for before, images in ((third, [one, two]), (second, [one])):
        served.check(images, turn(" so?", before))
    assert llm.stats()["num_restarts"] == num_restarts + 1


def test_command_line_matches_the_engine(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``generate`` and ``chat`` with ``--image``."""
    llm, image = served.llm, tmp_path / "one.png"
    drawing(1).save(image)
    shared = type("", (), {"from_config": staticmethod(lambda _: contextlib.nullcontext(llm))})
    monkeypatch.setattr(commands, "Engine", shared)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"what?\nand?\n")))
    given = ["--image", str(image), "--max-new-tokens", "6"]
    params, prompt = {"max_new_tokens": 6, "temperature": 0}, f"see {served.mark}"
    assert commands.run(["generate", prompt, *given]) == 0
    assert capsys.readouterr().out == llm.generate(prompt, params, image_data=image)["text"] + "\n"
    assert commands.run(["chat", *given]) == 0
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    first = llm.chat(messages, params)["text"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert capsys.readouterr().out == f"{first}\n{llm.chat(messages, params)['text']}\n"


@torch.inference_mode()
def vector_of(theirs: Any, ids: list[int], arrays: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the normalized state of transformers after the last token."""
    states = theirs(input_ids=torch.tensor([ids]), output_hidden_states=True, **arrays).hidden_states[-1]
    return torch.nn.functional.normalize(states[0, -1], dim=-1).numpy()


def test_generating_engine_also_returns_embeddings(served: Served) -> None:
    image = drawing(1)
    answer = served.llm.generate(f"see {served.mark}?", SHORT, image_data=image, return_prompt_token_ids=True)
    ids = answer["prompt_token_ids"]
    encoded: Any = served.llm.encode(f"see {served.mark}?", image_data=image)
    expected = vector_of(served.theirs, ids, inputs_of(served.folder, [image], torch.tensor([ids])))
    np.testing.assert_allclose(encoded["embedding"], expected, atol=1e-4)


@pytest.mark.slow
def test_embeddings_with_images_match_transformers(tmp_path: Path) -> None:
    theirs, one, two = made(tmp_path, "gemma3"), drawing(1), drawing(2, (50, 70))
    with Engine(tmp_path, device="cpu", context_length=100, is_embedding=True) as llm:
        outs: Any = llm.encode(
            ["see <start_of_image> or <start_of_image>?", "text"], image_data=[[file_of(one), two], None]
        )
        [plain] = llm.encode(["text"])
        assert np.array_equal(outs[1]["embedding"], plain["embedding"])
        assert outs[0]["meta_info"]["image_tokens"] == 2 * 16
        text = "see \n\n<start_of_image>{}<end_of_image>\n\n or \n\n<start_of_image>{}<end_of_image>\n\n?"
        ids = llm.tokenizer.encode(text.format(*["<image_soft_token>" * 16] * 2))
        assert len(ids) == outs[0]["meta_info"]["prompt_tokens"]
        expected = vector_of(theirs, ids, inputs_of(tmp_path, [one, two], torch.tensor([ids])))
        np.testing.assert_allclose(outs[0]["embedding"], expected, atol=1e-4)
        with pytest.raises(ValueError, match="106 tokens, including 64 for images; at most 100 are allowed"):
            llm.encode("<start_of_image>" * 4 + "x" * 18, image_data=[one] * 4, truncate=True)
        with pytest.raises(ValueError, match="2 image placeholders .* for 1 image"):
            llm.encode("<start_of_image><start_of_image>", image_data=one)
        with pytest.raises(ValueError, match="1 image placeholder .* for 0 images"):
            llm.encode("<start_of_image>")
