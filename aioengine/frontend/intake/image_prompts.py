"""The images of calls: which prompt has which, checked at the call; put in place when they are prepared."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from aioengine.api import checks
from aioengine.errors import EngineError, EngineStartupError
from aioengine.frontend.intake.prompts import ChatIds, ChatPrompt, EmbedsIds, MediaIds
from aioengine.media.intake.image_intake import ImageIntake, ImagesOfPrompt
from aioengine.media.intake.sources import NOT_TRUNCATED, ImageSource, check_number
from aioengine.media.placeholders import check_count, image_ids, placed
from aioengine.protocol.messages import Media
from aioengine.settings.machine import num_threads
from aioengine.supervision.tasks import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.frontend.calls.call import Call
    from aioengine.frontend.intake.encoder import Encoded, Encoder
    from aioengine.frontend.intake.requests import CallRequest
    from aioengine.media.placeholders import ImageIds
    from aioengine.media.tokens._base import ImageModel, ImageShape

MAX_AHEAD: Final = 16
"""Prompts of a batch whose images are prepared while those of the first are waited for."""

MAX_KNOWN_TEXTS: Final = 4096


def check_images(request: CallRequest, place: int, images: PromptImages | None) -> None:
    """Check the images of a prompt, as far as they are known at the call. From any thread.

    Raises:
        TypeError, ValueError: what is wrong; also images for a model that takes text alone.
        EngineError: Pillow is missing.
    """
    prompt = request.prompts[place]
    own = prompt.images if isinstance(prompt, ChatPrompt) else ()
    given = request.images
    if not own and (given is None or (images is None and not given.has_images(place))):
        return
    if images is None:
        what = "image_data is given" if not own else "the messages have images"
        raise ValueError(f"{what}, and this model takes text alone")
    if not _has_pillow():
        raise EngineError("images need Pillow, which is not installed: pip install 'aioengine[images]'")
    if own and isinstance(prompt, ChatPrompt) and prompt.rules.keep_last is not None:
        raise ValueError(NOT_TRUNCATED)
    images.sources(request, place, own)


@cache
def _has_pillow() -> bool:
    return find_spec("PIL") is not None


def check_no_images(token_ids: list[int], images: PromptImages) -> None:
    """Raise ValueError for a prompt that has placeholders, and no images."""
    if not isinstance(token_ids, MediaIds | EmbedsIds):
        check_count(token_ids, images.placeholder_id, 0)


class _Held:
    """The images of a prompt, and how many of its rows have not ended."""

    def __init__(self, images: ImagesOfPrompt, num_rows: int) -> None:
        self.images = images
        self.num_rows = num_rows


class PromptImages:
    """Prepares the images of prompts and puts them in place. On the loop, but for ``sources`` and ``close``."""

    def __init__(self, intake: ImageIntake, encoder: Encoder | None) -> None:
        model = intake.model
        self.intake = intake
        self.placeholder_id = model.family.placeholder_id
        self._family = model.family
        self._max_images = model.limits.max_images_per_prompt
        self._encoder = encoder
        self._held: dict[Call, dict[int, _Held]] = {}
        self._ids_of_text: dict[str, list[int]] = {}

    def close(self) -> None:
        """End the media process and remove all files, at once. From any thread."""
        self.intake.close()

    def start_close(self) -> Future[None]:
        """Close it on a thread: removing large files takes a moment. Done when all is removed."""
        ended: Future[None] = Future()

        def close() -> None:
            try:
                self.close()
            finally:
                ended.set_result(None)

        try:
            start_thread(close, name="aioengine-images-end")
        except EngineStartupError:  # no more threads
            close()
        return ended

    def sources(self, request: CallRequest, place: int, own: tuple[ImageSource | None, ...]) -> tuple[ImageSource, ...]:
        """The images of a prompt: ``own`` are those of its messages, with None for each that is given beside them.

        Raises TypeError or ValueError. From any thread.
        """
        given = () if request.images is None else request.images.of(place, self._max_images)
        check_number("the prompt", len(own), self._max_images)
        if not isinstance(request.prompts[place], ChatPrompt):
            return given
        num_open = own.count(None)
        if num_open != len(given):
            raise ValueError(
                f'parts {{"type": "image"}} without an image of their own in the messages: {num_open}; images in '
                f"image_data: {len(given)}; give one for each"
            )
        rest = iter(given)
        return tuple(next(rest) if source is None else source for source in own)

    # ------------------------------------------------------------ a prompt after the other

    def place(self, call: Call, encoded: Encoded, done: Callable[[Encoded, float], None]) -> None:
        """Prepare the images of the call's next prompt, and put them in place in its ids.

        ``done`` gets the ids, or why the prompt can have none, and the seconds that it took; some turns of the loop
        later where there are images.
        """
        prompt, began_at = call.num_started // call.request.num_samples, time.monotonic()
        try:
            sources = self._sources_of(call, prompt, encoded)
            if isinstance(encoded, list):
                if sources and self.placeholder_id not in encoded:
                    what = f"no image placeholder, and {checks.counted(len(sources), 'image')}"
                    raise ValueError(f"the prompt has {what}; write {self._family.placeholder} in it for each")
                check_count(encoded, self.placeholder_id, len(sources))
        except (TypeError, ValueError) as error:
            done(error, 0.0)
            return
        if not isinstance(encoded, list) or not sources:
            done(encoded, 0.0)
            return
        images = self._begin(call, prompt, sources)
        self._begin_others(call, prompt)

        def prepared() -> None:
            done(images.error or self._placed(encoded, images), time.monotonic() - began_at)

        images.when_over(prepared)

    def _sources_of(self, call: Call, prompt: int, encoded: Encoded) -> tuple[ImageSource, ...]:
        if isinstance(call.request.prompts[prompt], Exception):
            return ()
        return self.sources(call.request, prompt, encoded.images if isinstance(encoded, ChatIds) else ())

    def _begin(self, call: Call, prompt: int, sources: tuple[ImageSource, ...]) -> ImagesOfPrompt:
        held = self._held.setdefault(call, {})
        if prompt not in held:
            name = f" of prompt {prompt}" if call.request.is_batch else ""
            images = ImagesOfPrompt(sources, name)
            held[prompt] = _Held(images, call.request.num_samples)
            self.intake.begin(images)
        return held[prompt].images

    def _begin_others(self, call: Call, prompt: int) -> None:
        """Begin with the images of the next prompts, too."""
        request = call.request
        for place in range(prompt + 1, min(prompt + MAX_AHEAD, len(request.prompts))):
            given = request.prompts[place]
            if isinstance(given, Exception) or not given.is_checked:
                continue
            sources = self.sources(request, place, given.images if isinstance(given, ChatPrompt) else ())
            if sources:
                self._begin(call, place, sources)

    def _placed(self, encoded: list[int], images: ImagesOfPrompt) -> MediaIds | ValueError:
        try:
            tokens = [self._image_ids(file.shape) for file in images.prepared if file.shape is not None]
            ids, starts = placed(encoded, self.placeholder_id, tokens)
        except ValueError as error:
            return error
        media = [
            Media(start, len(image.token_ids), image.num_features, file.content, file.path, file.shape.grid)
            for start, image, file in zip(starts, tokens, images.prepared, strict=True)
            if file.shape is not None
        ]
        return MediaIds(ids, media)

    def _image_ids(self, shape: ImageShape) -> ImageIds:
        tokenize = None if self._encoder is None else self._tokenize
        return image_ids(self._family.expansion(shape), self.placeholder_id, tokenize)

    def _tokenize(self, text: str) -> list[int]:
        assert self._encoder is not None
        if text not in self._ids_of_text:
            if len(self._ids_of_text) >= MAX_KNOWN_TEXTS:
                self._ids_of_text.clear()
            [self._ids_of_text[text]] = self._encoder.tokenize([text])
        return self._ids_of_text[text]

    # ------------------------------------------------------------ until they are needed no more

    def row_ended(self, call: Call, prompt: int) -> None:
        """One of the rows of a prompt has ended; the call goes on."""
        held = self._held.get(call, {}).get(prompt)
        if held is not None:
            held.num_rows -= 1
            if held.num_rows <= 0:
                self.intake.release(held.images)

    def release(self, call: Call) -> None:
        """The call is over."""
        for held in self._held.pop(call, {}).values():
            self.intake.release(held.images)


def start_intake(model: ImageModel, *, is_for_gpu: bool) -> ImageIntake:
    """For this machine: as many images are prepared at a time as it has cores, but for one.

    The process that prepares them starts now, beside the others, so that the first image need not wait for it.
    """
    intake = ImageIntake(model, max(1, num_threads() - 1), is_for_gpu=is_for_gpu)
    if _has_pillow():
        intake.process.start()
    return intake
