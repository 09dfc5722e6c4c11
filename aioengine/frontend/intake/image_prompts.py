"""The images of calls: checks them at the call, has them prepared, and puts their tokens into the prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib.util import find_spec
from typing import Final

import msgspec

from aioengine.api import checks
from aioengine.errors import EngineError, EngineStartupError
from aioengine.frontend.calls.call import Call
from aioengine.frontend.intake.encoder import Encoded, Encoder
from aioengine.frontend.intake.prompts import ChatIds, ChatPrompt, EmbedsIds, MediaIds
from aioengine.frontend.intake.requests import CallRequest
from aioengine.media.intake.image_intake import ImageIntake, ImagesOfPrompt
from aioengine.media.intake.sources import NOT_TRUNCATED, ImageSource, check_number
from aioengine.media.placeholders import check_count, image_ids, placed
from aioengine.media.tokens._base import ImageModel
from aioengine.protocol.messages import Media
from aioengine.settings.machine import num_threads
from aioengine.supervision.tasks import WorkerThread

MAX_AHEAD: Final = 16
"""Prompts of a batch whose images are prepared at the same time."""

MAX_KNOWN_TEXTS: Final = 4096


def check_images(request: CallRequest, index: int, images: PromptImages | None) -> None:
    """Check the images of a prompt as far as possible at the call. From any thread. ``images``: None without a model.

    Raises:
        TypeError, ValueError: an invalid image, or an image for a model without images.
        EngineError: Pillow is missing.
    """
    prompt = request.prompts[index]
    in_messages = prompt.images if isinstance(prompt, ChatPrompt) else ()
    image_data = request.images
    if not in_messages and (image_data is None or (images is None and not image_data.has_images(index))):
        return
    if images is None:
        problem = "the messages have images" if in_messages else "image_data is given"
        raise ValueError(f"{problem}, and this model accepts only text")
    if not _has_pillow():
        raise EngineError("images need Pillow, which is not installed: pip install 'aioengine[images]'")
    if in_messages and isinstance(prompt, ChatPrompt) and prompt.rules.keep_last is not None:
        raise ValueError(NOT_TRUNCATED)
    images.sources(request, index, in_messages)


@cache
def _has_pillow() -> bool:
    return find_spec("PIL") is not None


def check_no_images(token_ids: list[int], images: PromptImages) -> None:
    """Raise ValueError for a prompt without images that has placeholders."""
    if not isinstance(token_ids, MediaIds | EmbedsIds):
        check_count(token_ids, images.placeholder_id, 0)


class _HeldImages(msgspec.Struct):
    """``num_rows``: rows of the prompt that have not ended."""

    images: ImagesOfPrompt
    num_rows: int


class PromptImages:
    """Prepares the images of prompts and puts their tokens into them. On the loop, except ``sources`` and ``close``."""

    def __init__(self, intake: ImageIntake, encoder: Encoder) -> None:
        model = intake.model
        self.intake = intake
        self.placeholder_id = model.placeholder_id
        self._family = model.family
        self._max_images = model.limits.max_images_per_prompt
        self._encoder = encoder
        self._held: dict[Call, dict[int, _HeldImages]] = {}
        self._ids_of_text: dict[str, list[int]] = {}

    def close(self) -> None:
        """Kill the media process and remove all files. From any thread."""
        self.intake.close()

    def start_close(self) -> Future[None]:
        """Close on a thread, because removing large files takes a moment."""
        try:
            return WorkerThread[None]("aioengine-images-end").submit(self.close)
        except EngineStartupError:  # no more threads
            self.close()
            ended = Future[None]()
            ended.set_result(None)
            return ended

    def sources(
        self, request: CallRequest, index: int, in_messages: tuple[ImageSource | None, ...]
    ) -> tuple[ImageSource, ...]:
        """Return the images of a prompt. In ``in_messages``, None stands for the next image of ``image_data``.

        Raises TypeError or ValueError. From any thread.
        """
        image_data = () if request.images is None else request.images.of(index, self._max_images)
        check_number("the prompt", len(in_messages), self._max_images)
        if not isinstance(request.prompts[index], ChatPrompt):
            return image_data
        num_open = in_messages.count(None)
        if num_open != len(image_data):
            raise ValueError(
                f'parts {{"type": "image"}} without an image of their own in the messages: {num_open}; images in '
                f"image_data: {len(image_data)}; give one for each"
            )
        rest = iter(image_data)
        return tuple(next(rest) if source is None else source for source in in_messages)

    # ------------------------------------------------------------ the next prompt of a call

    def place(self, call: Call, encoded: Encoded, done: Callable[[Encoded, float], None]) -> None:
        """Prepare the images of the call's next prompt, and put their tokens into its ids.

        ``done`` gets the ids or the error, and the seconds that this took. If there are images, it is called later.
        """
        prompt_index, began_at = call.num_started // call.request.num_samples, time.monotonic()
        try:
            sources: tuple[ImageSource, ...] = ()
            if not isinstance(call.request.prompts[prompt_index], Exception):
                in_messages = encoded.images if isinstance(encoded, ChatIds) else ()
                sources = self.sources(call.request, prompt_index, in_messages)
            if isinstance(encoded, list):
                if sources and self.placeholder_id not in encoded:
                    images = checks.counted(len(sources), "image")
                    hint = f"write {self._family.placeholder} once for each image"
                    raise ValueError(f"the prompt has {images} but no placeholder; {hint}")
                check_count(encoded, self.placeholder_id, len(sources))
        except (TypeError, ValueError) as error:
            done(error, 0.0)
            return
        if not isinstance(encoded, list) or not sources:
            done(encoded, 0.0)
            return
        prompt_images = self._begin(call, prompt_index, sources)
        self._begin_ahead(call, prompt_index)

        def prepared() -> None:
            done(prompt_images.error or self._placed(encoded, prompt_images), time.monotonic() - began_at)

        prompt_images.when_done(prepared)

    def _begin(self, call: Call, prompt_index: int, sources: tuple[ImageSource, ...]) -> ImagesOfPrompt:
        held = self._held.setdefault(call, {})
        if prompt_index not in held:
            name = f" of prompt {prompt_index}" if call.request.is_batch else ""
            images = ImagesOfPrompt(sources, name)
            held[prompt_index] = _HeldImages(images, call.request.num_samples)
            self.intake.begin(images)
        return held[prompt_index].images

    def _begin_ahead(self, call: Call, prompt_index: int) -> None:
        """Begin with the images of the next prompts of the batch."""
        request = call.request
        for index in range(prompt_index + 1, min(prompt_index + MAX_AHEAD, len(request.prompts))):
            ahead = request.prompts[index]
            if isinstance(ahead, Exception):
                continue
            sources = self.sources(request, index, ahead.images if isinstance(ahead, ChatPrompt) else ())
            if sources:
                self._begin(call, index, sources)

    def _placed(self, encoded: list[int], images: ImagesOfPrompt) -> MediaIds | ValueError:
        tokenize = self._tokenize if self._encoder.has_tokenizer else None
        shapes = [file.shape for file in images.prepared if file.shape is not None]
        try:
            tokens = [image_ids(self._family.expansion(shape), self.placeholder_id, tokenize) for shape in shapes]
            ids, starts = placed(encoded, self.placeholder_id, tokens)
        except ValueError as error:
            return error
        media = [
            Media(start, len(image.token_ids), image.num_features, file.content, file.path, file.shape.grid)
            for start, image, file in zip(starts, tokens, images.prepared, strict=True)
            if file.shape is not None
        ]
        return MediaIds(ids, media)

    def _tokenize(self, text: str) -> list[int]:
        if text not in self._ids_of_text:
            if len(self._ids_of_text) >= MAX_KNOWN_TEXTS:
                self._ids_of_text.clear()
            [self._ids_of_text[text]] = self._encoder.tokenize([text])
        return self._ids_of_text[text]

    # ------------------------------------------------------------ release

    def row_ended(self, call: Call, prompt_index: int) -> None:
        """Release the images of a prompt after its last row."""
        held = self._held.get(call, {}).get(prompt_index)
        if held is not None:
            held.num_rows -= 1
            if held.num_rows <= 0:
                self.intake.release(held.images)

    def release(self, call: Call) -> None:
        """Release the images of a call that is over."""
        for held in self._held.pop(call, {}).values():
            self.intake.release(held.images)


def start_intake(model: ImageModel, *, is_for_gpu: bool) -> ImageIntake:
    """Create the intake, with one worker fewer than this machine has cores.

    The media process starts now, so that the first image does not wait for it.
    """
    intake = ImageIntake(model, max(1, num_threads() - 1), is_for_gpu=is_for_gpu)
    if _has_pillow():
        intake.process.start()
    return intake
