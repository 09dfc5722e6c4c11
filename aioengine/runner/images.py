"""Images in prompts: their features, which replace token embeddings, and their positions.

The vision tower runs in the step whose rows first need features of an image. Features are cached on the device by the
content of the image (least recently used are evicted first). So an image is computed once, even if it is in several
prompts, in several chunks, or in a preempted request.

T packed tokens of the step, X tokens of a prompt, N tokens of an image with features, D model size, K deepstack layers,
A axes of a position.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from aioengine.attention._base import BidirectionalImage
from aioengine.kernels.arrays import Ints64
from aioengine.models._base import Model, ModelInputs, VisionModel
from aioengine.protocol.messages import Media
from aioengine.runner.transfer import Upload
from aioengine.runner.weight_reading import read_arrays
from aioengine.scheduler.plan import NewRow, Row
from aioengine.settings.memory_model import CPU_FEATURE_BYTES, GPU_FEATURE_BYTES


class Span(NamedTuple):
    """Positions ``start`` to ``end`` of a request with images: row ``row`` of the step, from token ``first`` on."""

    row: int
    uid: int
    row_index: int
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class _FeatureTokens:
    """An image of an open request. indices: [N] the prompt tokens that get its features, ascending."""

    media: Media
    indices: Ints64


@dataclass(frozen=True, slots=True)
class _ImageRequest:
    """The images of an open request. end: end of the last image. positions: [A, X] if positions have several axes."""

    images: list[_FeatureTokens]
    end: int
    num_prompt: int
    positions: Ints64 | None


class Images:
    """The images of open requests.

    Attributes:
        requests: uid -> images, of each open request with images.
        deltas: [max_rows] by row index: position of an output token minus its index in the request.
    """

    def __init__(self, model: VisionModel, *, axes: int, max_rows: int, is_on_gpu: bool) -> None:
        """axes: number of axes of a position."""
        self._model = model
        self._axes = axes
        self._is_on_gpu = is_on_gpu
        self._max_bytes = GPU_FEATURE_BYTES if is_on_gpu else CPU_FEATURE_BYTES
        self.deltas = np.zeros(max_rows, dtype=np.int64)
        self.requests: dict[int, _ImageRequest] = {}
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()  # content -> [N, (1 + K) * D]
        self._num_bytes = 0
        self._step: dict[bytes, Tensor] = {}  # the features that this step needs

    def open(self, opened: NewRow, row_index: int) -> None:
        """Add the images of a request.

        Raises:
            ValueError: the prompt has a wrong number of placeholders for an image.
        """
        prompt = np.array(opened.token_ids[: opened.num_prompt], dtype=np.int64)
        images: list[_FeatureTokens] = []
        for media in opened.media:
            own = prompt[media.start : media.start + media.num_tokens]
            indices = np.flatnonzero(own == self._model.image_token_id) + media.start
            if len(indices) != media.num_features:
                message = f"an image of {media.num_features} features has {len(indices)} placeholders in the prompt"
                raise ValueError(message)
            images.append(_FeatureTokens(media, indices))
        positions: Ints64 | None = None
        if self._axes > 1:
            positions = grid_positions(opened.num_prompt, opened.media)
            self.deltas[row_index] = positions.max() + 1 - opened.num_prompt
        end = max(image.media.start + image.media.num_tokens for image in images)
        self.requests[opened.uid] = _ImageRequest(images, end, opened.num_prompt, positions)

    def close(self, uid: int, row_index: int) -> None:
        """Remove the images of a request. Its features stay in the cache."""
        if self.requests.pop(uid, None) is not None:
            self.deltas[row_index] = 0

    def encode(self, rows: Sequence[Row]) -> dict[int, str]:
        """Compute the features of all images that these rows need. Return uid -> error of requests that fail."""
        self._step = {}
        errors: dict[int, str] = {}
        for row in rows if self.requests else ():
            request = self.requests.get(row.uid)
            if request is None or row.start >= request.end:
                continue
            for image in request.images:
                first, last = _part(image, row.start, row.start + row.count)
                if first == last or image.media.content in self._step:
                    continue
                try:
                    self._step[image.media.content] = self._features(image.media)
                except (ValueError, torch.OutOfMemoryError) as error:
                    errors[row.uid] = f"cannot compute its image: {error}"
                    break
        return errors

    def forget_features(self) -> None:
        """Empty the cache of features."""
        self._cache.clear()
        self._num_bytes = 0

    def positions(self, spans: Sequence[Span], indices: Ints64) -> Ints64:
        """Return the positions [A, T], or [T] for one axis, of the tokens at ``indices`` [T] of their requests."""
        if self._axes == 1:
            return indices
        positions = np.tile(indices, (self._axes, 1))
        for _, uid, row_index, start, end, first in spans:
            request = self.requests[uid]
            assert request.positions is not None
            num_prompt = max(min(end, request.num_prompt) - start, 0)
            positions[:, first : first + num_prompt] = request.positions[:, start : start + num_prompt]
            positions[:, first + num_prompt : first + end - start] += self.deltas[row_index]
        return positions

    def add_features(self, spans: Sequence[Span], inputs: ModelInputs, upload: Upload) -> ModelInputs:
        """Return the inputs with image features in place of the embeddings of image tokens."""
        indices: list[Ints64] = []
        parts: list[Tensor] = []
        for _, uid, _, start, end, first in spans:
            for image in self.requests[uid].images:
                low, high = _part(image, start, end)
                if low < high:
                    indices.append(image.indices[low:high] + (first - start))
                    parts.append(self._step[image.media.content][low:high])
        if not indices:
            return inputs
        assert inputs.embeddings is not None, "a model that reads images reads embeddings"
        tokens, features = upload(np.concatenate(indices)), torch.cat(parts)
        size = inputs.embeddings.shape[1]
        embeddings = inputs.embeddings.index_copy(0, tokens, features[:, :size])
        deepstack = (tokens, features[:, size:].unflatten(1, (-1, size))) if self._model.num_deepstack else None
        return replace(inputs, embeddings=embeddings, deepstack=deepstack)

    def bidirectional(self, spans: Sequence[Span]) -> list[BidirectionalImage]:
        """Return the images in the step, for a model with bidirectional attention within images."""
        images: list[BidirectionalImage] = []
        for row, uid, _, start, end, first in spans:
            for image in self.requests[uid].images:
                begin, stop = int(image.indices[0]), int(image.indices[-1]) + 1
                if begin < end and start < stop:
                    assert stop <= end, "the scheduler must not split images of this model"
                    images.append(BidirectionalImage(row, first + max(begin - start, 0), max(begin, start), stop))
        return images

    def _features(self, media: Media) -> Tensor:
        """Return the features [N, (1 + K) * D] of an image, from the cache or computed.

        Raises:
            ValueError: the file cannot be read, or the number of features differs from the number of placeholders.
        """
        features = self._cache.get(media.content)
        if features is not None:
            self._cache.move_to_end(media.content)
            return features
        arrays = load(media.data) if media.data else read_arrays(media.path, is_pinned=self._is_on_gpu)
        features = self._model.encode_image(arrays)
        if len(features) != media.num_features:
            message = f"the vision tower returned {len(features)} features for {media.num_features} placeholders"
            raise ValueError(message)
        self._cache[media.content] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            _, evicted = self._cache.popitem(last=False)
            self._num_bytes -= evicted.nbytes
        return features


def images_of(model: Model, *, max_rows: int, device: torch.device) -> Images | None:
    """Return the images of requests to this model; None: the model reads no images."""
    if not isinstance(model, VisionModel):
        return None
    return Images(model, axes=model.input_spec.position_axes, max_rows=max_rows, is_on_gpu=device.type == "cuda")


def grid_positions(num_prompt: int, media: Sequence[Media]) -> Ints64:
    """Return the positions [3, X] (time, height, width) of the tokens of a prompt.

    A text token advances all three axes. The tokens of an image have the same time, and their row and column, starting
    at the position after the preceding text. The following text continues after the maximum of these.
    """
    positions = np.empty((3, num_prompt), dtype=np.int64)
    index = position = 0
    for image in sorted(media, key=lambda image: image.start):
        num_text = image.start - index
        positions[:, index : image.start] = np.arange(position, position + num_text)
        index, position = image.start + image.num_tokens, position + num_text
        frames, height, width = image.grid
        merged = max(math.isqrt(frames * height * width // max(image.num_tokens, 1)), 1)
        size = frames, height // merged, width // merged
        positions[:, image.start : index] = np.indices(size).reshape(3, -1) + position
        position += max(size)
    positions[:, index:] = np.arange(position, position + num_prompt - index)
    return positions


def _part(image: _FeatureTokens, start: int, end: int) -> tuple[int, int]:
    """Return the range of the image's features for prompt tokens ``start`` to ``end``."""
    first, last = np.searchsorted(image.indices, (start, end)).tolist()
    return first, last
