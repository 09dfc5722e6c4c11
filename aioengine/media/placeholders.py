"""Expands the placeholders of images in prompts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aioengine.api import checks
from aioengine.media.tokens._base import Expansion


class ImageIds(NamedTuple):
    """The tokens of one image in a prompt. ``num_features``: the number of placeholders among them."""

    token_ids: list[int]
    num_features: int


def image_ids(expansion: Expansion, placeholder_id: int, tokenize: Callable[[str], list[int]] | None) -> ImageIds:
    """Return the tokens of an image.

    Each text is tokenized separately, since texts start and end with special tokens. Raises ValueError if there are
    texts and no tokenizer.
    """
    token_ids: list[int] = []
    for index, text in enumerate(expansion.texts):
        if index:
            token_ids += [placeholder_id] * expansion.num_repeats
        if text and tokenize is None:
            raise ValueError("images of this model need its tokenizer; this engine has none (skip_tokenizer_init)")
        if text and tokenize is not None:
            token_ids += tokenize(text)
    return ImageIds(token_ids, expansion.num_features)


def check_count(token_ids: Sequence[int], placeholder_id: int, num_images: int) -> None:
    """Raise ValueError for a prompt with fewer placeholders than images. More may be expanded placeholders."""
    count = token_ids.count(placeholder_id)
    if count < num_images or (count and not num_images):
        raise _mismatch(count, num_images, placeholder_id)


def placed(token_ids: Sequence[int], placeholder_id: int, images: Sequence[ImageIds]) -> tuple[list[int], list[int]]:
    """Return the prompt with expanded placeholders, and the start index of each image.

    The prompt has one placeholder per image, or is expanded already. Raises ValueError for other numbers of
    placeholders.
    """
    count = token_ids.count(placeholder_id)
    num_features = sum(image.num_features for image in images)
    starts: list[int] = []
    done = 0
    if count == len(images):
        ids: list[int] = []
        for image in images:
            index = token_ids.index(placeholder_id, done)
            ids += token_ids[done:index]
            starts.append(len(ids))
            ids += image.token_ids
            done = index + 1
        return [*ids, *token_ids[done:]], starts
    if count != num_features:
        raise _mismatch(count, len(images), placeholder_id, num_features)
    for number, image in enumerate(images):
        start = token_ids.index(placeholder_id, done) - image.token_ids.index(placeholder_id)
        done = start + len(image.token_ids)
        if list(token_ids[max(0, start) : done]) != image.token_ids:
            missing = f"the prompt has the {image.num_features} placeholders of image {number} without its other tokens"
            raise ValueError(f"{missing}; give one placeholder (token id {placeholder_id}) per image")
        starts.append(start)
    return list(token_ids), starts


def _mismatch(count: int, num_images: int, placeholder_id: int, num_features: int = 0) -> ValueError:
    or_all = f" (or {num_features}, one for each of their features)" if num_features else ""
    images, placeholders = checks.counted(num_images, "image"), checks.counted(count, "image placeholder")
    return ValueError(f"the prompt has {placeholders} (token id {placeholder_id}) for {images}; give one each{or_all}")
