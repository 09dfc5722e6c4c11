"""Images in prompts: their features, which take the place of embeddings, and their positions.

The vision tower runs in the step whose rows first need features of an image. They are kept on the device by the
content of the image, the least recently used dropped first, so that an image in several prompts, in several chunks of
one, or in a request that was preempted is computed once.

Shape letters: T packed tokens of the step, X of a prompt, N tokens of an image that get features, D model size,
K layers behind which further features are added, A axes of a position.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from aioengine.attention._base import BidirectionalImage
from aioengine.models._base import VisionModel
from aioengine.runner.tensor_files import read_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.models._base import Model, ModelInputs
    from aioengine.protocol.messages import Media
    from aioengine.runner.transfer import Upload
    from aioengine.scheduler.plan import NewRow, Row

    Ints = npt.NDArray[np.int64]

GPU_FEATURE_BYTES: Final = 1 << 30
CPU_FEATURE_BYTES: Final = 256 << 20
"""Of the features that are kept for later steps: those of about a hundred images of a megapixel for a model of 7B."""


class Span(NamedTuple):
    """Positions of a request with images, from ``start`` to ``end``: the tokens of a step from ``first`` on, those of
    its row ``row``.
    """

    row: int
    uid: int
    row_index: int
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """An image of an open request. places: [N] the positions in the prompt that get its features, ascending."""

    media: Media
    places: Ints


@dataclass(frozen=True, slots=True)
class _Opened:
    """The images of an open request. end: behind the last place of any. positions: [A, X] of a model with axes."""

    images: list[_Placed]
    end: int
    num_prompt: int
    positions: Ints | None


class Images:
    """The images of open requests.

    Attributes:
        num_open: requests with images.
        deltas: [max_rows] by row index, what is added to the place of a token behind the prompt for its position.
    """

    def __init__(self, model: VisionModel, *, axes: int, hidden_size: int, max_rows: int, is_on_gpu: bool) -> None:
        """axes: of a position."""
        self._model = model
        self._axes = axes
        self._hidden_size = hidden_size
        self._is_on_gpu = is_on_gpu
        self._max_bytes = GPU_FEATURE_BYTES if is_on_gpu else CPU_FEATURE_BYTES
        self.deltas = np.zeros(max_rows, dtype=np.int64)
        self._opened: dict[int, _Opened] = {}
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # by content: [N, (1 + K) * D]
        self._num_bytes = 0
        self._step: dict[bytes, Tensor] = {}  # those that the rows of this step need

    @property
    def num_open(self) -> int:
        return len(self._opened)

    def open(self, opened: NewRow, row_index: int) -> None:
        """Take in the images of a request.

        Raises:
            ValueError: an image has another number of placeholders in the prompt than it should.
        """
        prompt = np.array(opened.token_ids[: opened.num_prompt], dtype=np.int64)
        images = [_Placed(each, self._places(each, prompt)) for each in opened.media]
        positions: Ints | None = None
        if self._axes > 1:
            positions = grid_positions(opened.num_prompt, opened.media)
            self.deltas[row_index] = positions.max() + 1 - opened.num_prompt
        end = max(image.media.start + image.media.num_tokens for image in images)
        self._opened[opened.uid] = _Opened(images, end, opened.num_prompt, positions)

    def close(self, uid: int, row_index: int) -> None:
        """Forget the images of a request; its features stay while there is room."""
        if self._opened.pop(uid, None) is not None:
            self.deltas[row_index] = 0

    def encode(self, rows: Sequence[Row]) -> dict[int, str]:
        """Have the features of all images that these rows need; returns by uid why those of a request cannot be had."""
        self._step = {}
        errors: dict[int, str] = {}
        for row in rows if self._opened else ():
            opened = self._opened.get(row.uid)
            if opened is None or row.start >= opened.end:
                continue
            for image in opened.images:
                first, last = _part(image, row.start, row.start + row.count)
                if first == last or image.media.content in self._step:
                    continue
                try:
                    self._step[image.media.content] = self._features(image.media)
                except (ValueError, torch.OutOfMemoryError) as error:
                    errors[row.uid] = f"cannot compute its image: {error}"
                    break
        return errors

    def __contains__(self, uid: object) -> bool:
        """Whether this open request has images."""
        return uid in self._opened

    def positions(self, spans: Sequence[Span], places: Ints) -> Ints:
        """The positions [A, T] (or [T] for one axis) of tokens at ``places`` [T] of their requests."""
        if self._axes == 1:
            return places
        found = np.tile(places, (self._axes, 1))
        for _, uid, row_index, start, end, first in spans:
            opened = self._opened[uid]
            assert opened.positions is not None
            num_prompt = max(min(end, opened.num_prompt) - start, 0)
            found[:, first : first + num_prompt] = opened.positions[:, start : start + num_prompt]
            found[:, first + num_prompt : first + end - start] += self.deltas[row_index]
        return found

    def fill_in(self, spans: Sequence[Span], inputs: ModelInputs, upload: Upload) -> ModelInputs:
        """The inputs with the features of images in place, where they belong to tokens of the step."""
        places: list[Ints] = []
        parts: list[Tensor] = []
        for _, uid, _, start, end, first in spans:
            for image in self._opened[uid].images:
                low, high = _part(image, start, end)
                if low < high:
                    places.append(image.places[low:high] + (first - start))
                    parts.append(self._step[image.media.content][low:high])
        if not places:
            return inputs
        assert inputs.embeddings is not None, "a model that reads images reads embeddings"
        where, features = upload(np.concatenate(places)), torch.cat(parts)
        size = self._hidden_size
        embeddings = inputs.embeddings.index_copy(0, where, features[:, :size])
        deepstack = (where, features[:, size:].unflatten(1, (-1, size))) if self._model.num_deepstack else None
        return replace(inputs, embeddings=embeddings, deepstack=deepstack)

    def whole(self, spans: Sequence[Span]) -> list[BidirectionalImage]:
        """The images in the step, of a model whose tokens of an image attend to all of it."""
        found: list[BidirectionalImage] = []
        for row, uid, _, start, end, first in spans:
            for image in self._opened[uid].images:
                begin, stop = int(image.places[0]), int(image.places[-1]) + 1
                if begin < end and start < stop:
                    assert stop <= end, "the scheduler does not divide images of this model"
                    found.append(BidirectionalImage(row, first + max(begin - start, 0), max(begin, start), stop))
        return found

    def _places(self, media: Media, prompt: Ints) -> Ints:
        """The positions [N] of an image's features in the ``prompt`` [X]."""
        own = prompt[media.start : media.start + media.num_tokens]
        places = np.flatnonzero(own == self._model.image_token_id) + media.start
        if len(places) != media.num_features:
            message = f"an image of {media.num_features} features has {len(places)} placeholders in the prompt"
            raise ValueError(message)
        return places

    def _features(self, media: Media) -> Tensor:
        """The features [N, (1 + K) * D] of an image, kept or computed.

        Raises:
            ValueError: its file cannot be read, or it has another number of features than placeholders.
        """
        features = self._kept.get(media.content)
        if features is not None:
            self._kept.move_to_end(media.content)
            return features
        features = self._model.encode_image(read_arrays(media.path, is_pinned=self._is_on_gpu))
        if len(features) != media.num_features:
            message = f"the vision tower gives {len(features)} features for {media.num_features} placeholders"
            raise ValueError(message)
        self._keep(media.content, features)
        return features

    def _keep(self, content: bytes, features: Tensor) -> None:
        """Keep [N, (1 + K) * D] for later steps, as far as there is room."""
        self._kept[content] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.nbytes


def images_of(model: Model, *, max_rows: int, device: torch.device) -> Images | None:
    """The images of requests to this model; None: it reads none."""
    if not isinstance(model, VisionModel):
        return None
    axes, hidden_size = model.input_spec.position_axes, model.hidden_size
    is_on_gpu = device.type == "cuda"
    return Images(model, axes=axes, hidden_size=hidden_size, max_rows=max_rows, is_on_gpu=is_on_gpu)


def grid_positions(num_prompt: int, media: Sequence[Media]) -> Ints:
    """The positions [3, X] (time, height, width) of the tokens of a prompt.

    Text counts on all three axes. An image begins where the text before it ends; its tokens have the same time, and
    their row and column; the text behind it goes on above the largest of these.
    """
    positions = np.empty((3, num_prompt), dtype=np.int64)
    place = position = 0
    for image in sorted(media, key=lambda each: each.start):
        num_text = image.start - place
        positions[:, place : image.start] = np.arange(position, position + num_text)
        place, position = image.start + image.num_tokens, position + num_text
        frames, height, width = image.grid
        merged = max(math.isqrt(frames * height * width // max(image.num_tokens, 1)), 1)
        size = frames, height // merged, width // merged
        positions[:, image.start : place] = np.indices(size).reshape(3, -1) + position
        position += max(size)
    positions[:, place:] = np.arange(position, position + num_prompt - place)
    return positions


def _part(image: _Placed, start: int, end: int) -> tuple[int, int]:
    """Which of its N features stand at positions from ``start`` to ``end`` of the prompt: from one index to another."""
    first, last = np.searchsorted(image.places, (start, end)).tolist()
    return first, last
