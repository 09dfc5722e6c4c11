"""Questions about pictures through the whole engine: the tokens of transformers, with its own preparation of images."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from aioengine import AsyncEngine, Engine
from aioengine.cli import commands
from aioengine.media._base import find_image_model
from tests.kit.image_models import FAMILIES, add_image_files
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


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def arrays_of(folder: Path, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """What the image processor of transformers makes of all of them together."""
    model = find_image_model(folder)
    assert model is not None
    module, _, name = model.processor.partition(":")
    found = getattr(importlib.import_module(module), name).from_dict(dict(model.settings))(images, return_tensors="pt")
    return dict(found)


@torch.inference_mode()
def check(theirs: Any, folder: Path, images: list[Image.Image], answer: Any) -> None:
    ids = torch.tensor([answer["prompt_token_ids"] + answer["output_ids"]])
    arrays = arrays_of(folder, images)
    if "image_grid_thw" in arrays:
        arrays["mm_token_type_ids"] = (ids == IMAGE).long()
    if arrays.pop("num_crops", None) is not None:
        arrays["token_type_ids"] = (ids == IMAGE).long()
    logits = theirs(input_ids=ids, use_cache=False, **arrays).logits[0]
    assert answer["output_ids"] == clear_tokens(logits, answer["output_ids"])
    assert answer["meta_info"]["image_tokens"] == answer["prompt_token_ids"].count(IMAGE)
    assert GREEDY.temperature == 0


def made(folder: Path, model_type: str) -> Any:
    theirs = save_vision_model(model_type, folder)
    add_image_files(folder, model_type, IMAGE, VOCAB_SIZE)
    return theirs


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name == "qwen2_5_vl" else pytest.mark.slow)
        for name in FAMILIES
        if name != "llava"
    ],
)
def test_answers_are_those_of_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, one, two = made(tmp_path, model_type), drawing(1), drawing(2, (50, 70))
    with Engine(tmp_path, device="cpu", context_length=256) as llm:
        mark = FAMILIES[model_type].prompt
        answer = llm.generate(f"see {mark} or {mark}?", SHORT, image_data=[png(one), two], return_prompt_token_ids=True)
        check(theirs, tmp_path, [one, two], answer)
        messages = [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "what?"}]}]
        check(theirs, tmp_path, [one], llm.chat(messages, SHORT, return_prompt_token_ids=True))
        if model_type == "qwen2_5_vl":
            check_command_line(llm, one, tmp_path / "one.png", monkeypatch, capsys)


def check_command_line(
    llm: Engine, image: Image.Image, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``generate`` and ``chat`` with ``--image`` give the answers of the engine."""
    image.save(path)
    shared = type("", (), {"from_config": staticmethod(lambda _: contextlib.nullcontext(llm))})
    monkeypatch.setattr(commands, "Engine", shared)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"what?\nand?\n")))
    given = ["--image", str(path), "--max-new-tokens", "6"]
    params = {"max_new_tokens": 6, "temperature": 0}
    prompt = f"see {FAMILIES['qwen2_5_vl'].prompt}"
    assert commands.run(["generate", prompt, *given]) == 0
    assert capsys.readouterr().out == llm.generate(prompt, params, image_data=path)["text"] + "\n"
    assert commands.run(["chat", *given]) == 0
    parts = [{"type": "image", "image": path}, {"type": "text", "text": "what?"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    first = llm.chat(messages, params)["text"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert capsys.readouterr().out == f"{first}\n{llm.chat(messages, params)['text']}\n"


@pytest.mark.parametrize("is_embedding", [None, True])
def test_vectors_of_texts_with_pictures_are_those_of_transformers(is_embedding: bool | None, tmp_path: Path) -> None:
    theirs, one, two = made(tmp_path, "gemma3"), drawing(1), drawing(2, (50, 70))
    with Engine(tmp_path, device="cpu", context_length=100, is_embedding=is_embedding) as llm:
        outs: Any = llm.encode(
            ["see <start_of_image> or <start_of_image>?", "text"], image_data=[[png(one), two], None]
        )
        [plain] = llm.encode(["text"])
        assert np.array_equal(outs[1]["embedding"], plain["embedding"])
        assert outs[0]["meta_info"]["image_tokens"] == 2 * 16
        text = "see \n\n<start_of_image>{}<end_of_image>\n\n or \n\n<start_of_image>{}<end_of_image>\n\n?"
        ids = llm.tokenizer.encode(text.format(*["<image_soft_token>" * 16] * 2))
        assert len(ids) == outs[0]["meta_info"]["prompt_tokens"]
        arrays = arrays_of(tmp_path, [one, two])
        del arrays["num_crops"]
        all_ids = torch.tensor([ids])
        arrays["token_type_ids"] = (all_ids == IMAGE).long()
        with torch.inference_mode():
            states = theirs(input_ids=all_ids, output_hidden_states=True, **arrays).hidden_states[-1]
        expected = torch.nn.functional.normalize(states[0, -1], dim=-1).numpy()
        np.testing.assert_allclose(outs[0]["embedding"], expected, atol=1e-4)
        with pytest.raises(ValueError, match=r"has 106 tokens, 64 of them of its images, and 100 fit; give smaller"):
            llm.encode("<start_of_image>" * 4 + "x" * 18, image_data=[one] * 4, truncate=True)
        with pytest.raises(ValueError, match="2 image placeholders .* for 1 image"):
            llm.encode("<start_of_image><start_of_image>", image_data=one)
        with pytest.raises(ValueError, match="1 image placeholder .* for 0 images"):
            llm.encode("<start_of_image>")


async def test_an_engine_answers_questions_about_pictures(tmp_path: Path) -> None:
    """LLaVA in batches, streams, with text beside it, and after its scheduler was killed."""
    theirs, one, two = made(tmp_path, "llava"), drawing(3), drawing(4, (30, 80))
    async with AsyncEngine(tmp_path, device="cpu", context_length=256, max_images_per_prompt=2) as engine:
        prompts = ["a <image>", "text", "b <image> <image>"]
        given = [png(one), None, [png(two), png(one)]]
        outs = await engine.async_generate(prompts, SHORT, image_data=given, return_prompt_token_ids=True)
        check(theirs, tmp_path, [one], outs[0])
        check(theirs, tmp_path, [two, one], outs[2])
        assert "image_tokens" not in outs[1]["meta_info"]
        again = await engine.async_generate("a <image> and?", SHORT, image_data=png(one), return_prompt_token_ids=True)
        check(theirs, tmp_path, [one], again)
        assert again["meta_info"]["cached_tokens"] >= 16, "the image is in the prefix cache"
        other = await engine.async_generate("a <image> and?", SHORT, image_data=png(two), return_prompt_token_ids=True)
        check(theirs, tmp_path, [two], other)

        several: Any = await engine.async_generate(
            "d <image>", {**SHORT, "n": 2}, image_data=png(two), return_prompt_token_ids=True, return_logprob=True
        )
        for answer in several:
            check(theirs, tmp_path, [two], answer)
            assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]

        long = {**SHORT, "max_new_tokens": 100}
        whole = await engine.async_generate("c <image>", long, image_data=one)
        text = ""
        async for chunk in engine.async_generate("c <image>", long, image_data=one, stream=True):
            if not text:
                scheduler = next(each for each in engine.health()["processes"] if each["role"] == "scheduler")
                os.kill(scheduler["pid"], signal.SIGKILL)
            text += chunk["text"]
        assert text == whole["text"]
        assert engine.stats()["num_restarts"] == 1


@pytest.mark.parametrize("model_type", ["qwen2_vl", pytest.param("smolvlm", marks=pytest.mark.slow)])
async def test_sessions_answer_about_the_pictures_of_earlier_turns(model_type: str, tmp_path: Path) -> None:
    await check_session(model_type, tmp_path, "cpu")


async def check_session(model_type: str, folder: Path, device: str) -> None:
    """Turns have the answers of transformers, also after the scheduler was killed, which knew their pages."""
    theirs, one, two = made(folder, model_type), drawing(5), drawing(6, (30, 80))
    mark = FAMILIES[model_type].prompt

    async with AsyncEngine(folder, device=device, dtype="float32", context_length=256) as engine:
        sid = await engine.open_session()

        async def turn(text: str, before: Any, image: object = None) -> Any:
            rid = None if before is None else before["meta_info"]["id"]
            params = {"id": sid, "rid": rid}
            return await engine.async_generate(
                text, SHORT, image_data=image, session_params=params, return_prompt_token_ids=True
            )

        first = await turn(f"see {mark}.", None, png(one))
        second = await turn(" and?", first)
        check(theirs, folder, [one], second)
        third = await turn(f" or {mark}", second, two)
        check(theirs, folder, [one, two], third)
        assert third["meta_info"]["cached_tokens"] >= 16
        scheduler = next(each for each in engine.health()["processes"] if each["role"] == "scheduler")
        os.kill(scheduler["pid"], signal.SIGKILL)
        for before, images in ((third, [one, two]), (second, [one])):
            check(theirs, folder, images, await turn(" so?", before))
        assert engine.stats()["num_restarts"] == 1
