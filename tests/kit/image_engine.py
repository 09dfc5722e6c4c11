"""Engines that accept images, with a real media process and a fake runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from aioengine import AsyncEngine
from aioengine.frontend.engine_parts import Blueprint
from aioengine.media.tokens._base import find_image_model
from aioengine.protocol.messages import Submit
from aioengine.settings.config import MediaConfig, TextSettings
from aioengine.testing.fake_engine import FakeSetup
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.image_models import FAMILIES, NUM_BYTES, SPECIAL

LLAVA = FAMILIES["llava"]
FEATURES = 16
"""Of an image of 28 x 28 pixels in patches of 7 x 7."""

LIMITS = MediaConfig(max_images_per_prompt=3, max_image_pixels=1_000_000, timeout_s=5.0)


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def blueprint(folder: Path, limits: MediaConfig = LIMITS, **setup: Any) -> Blueprint:
    base = FakeSetup(**{"processes": False, **setup})
    settings = base.settings()
    replace = msgspec.structs.replace
    images = find_image_model(folder)
    assert images is not None
    options = {**settings.runner.options, "vocab_size": NUM_BYTES + len(SPECIAL)}
    settings = replace(
        settings,
        model=replace(settings.model, path=str(folder), vocab_size=NUM_BYTES + len(SPECIAL)),
        runner=replace(settings.runner, options=options),
        text=TextSettings(tokenizer_path=str(folder)),
    )
    return replace(
        base.blueprint(),
        settings=settings,
        load_tokenizer=lambda: Tokenizer(folder),
        images=images._replace(limits=limits),
    )


def intake(engine: AsyncEngine) -> Any:
    return engine._run.frontend.images.intake


def media_folder(engine: AsyncEngine) -> Path:
    return Path(intake(engine)._folder.path)


def record_submits(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> list[Submit]:
    """Return a list to which all requests to the processes are appended."""
    recorded: list[Submit] = []
    submitter = engine._run.frontend.calls.submitter
    send = submitter._send

    def record(submits: list[Submit]) -> None:
        recorded.extend(submits)
        send(submits)

    monkeypatch.setattr(submitter, "_send", record)
    return recorded
