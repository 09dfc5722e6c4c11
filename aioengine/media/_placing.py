"""From a prompt with a placeholder for each image to the tokens that the model reads. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aioengine import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.media._base import Expansion


class ImageIds(NamedTuple):
    """The tokens of one image in a prompt. ``num_features``: of them, those with the placeholder's id."""

    token_ids: list[int]
    num_features: int


def image_ids(expansion: Expansion, placeholder_id: int, tokenize: Callable[[str], list[int]] | None) -> ImageIds:
    """The tokens of an image. Its texts begin and end with special tokens, so each is tokenized by itself.

    Raises:
        ValueError: it has texts, and there is no tokenizer.
    """
    token_ids: list[int] = []
    for place, text in enumerate(expansion.texts):
        if place:
            token_ids += [placeholder_id] * expansion.num_repeats
        if text and tokenize is None:
            raise ValueError(
                "images of this model need its tokenizer, which writes tokens between their tiles, and this engine has "
                "none (skip_tokenizer_init)"
            )
        if text and tokenize is not None:
            token_ids += tokenize(text)
    return ImageIds(token_ids, expansion.num_features)


def check_count(token_ids: Sequence[int], placeholder_id: int, num_images: int) -> None:
    """Raise ValueError for a prompt with fewer placeholders than images; more may be expanded ones."""
    count = token_ids.count(placeholder_id)
    if count < num_images or (count and not num_images):
        raise _mismatch(count, num_images, placeholder_id)


def placed(token_ids: Sequence[int], placeholder_id: int, images: Sequence[ImageIds]) -> tuple[list[int], list[int]]:
    """The prompt with the tokens of its images, and where each image begins.

    The prompt has one placeholder for each image, or all tokens of each already.

    Raises:
        ValueError: it has neither; the message has both numbers.
    """
    count = token_ids.count(placeholder_id)
    if count == len(images):
        return _replaced(token_ids, placeholder_id, images)
    num_features = sum(image.num_features for image in images)
    if count != num_features:
        raise _mismatch(count, len(images), placeholder_id, num_features)
    return list(token_ids), _found(token_ids, placeholder_id, images)


def _replaced(token_ids: Sequence[int], placeholder_id: int, images: Sequence[ImageIds]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    starts: list[int] = []
    done = 0
    for image in images:
        place = token_ids.index(placeholder_id, done)
        ids += token_ids[done:place]
        starts.append(len(ids))
        ids += image.token_ids
        done = place + 1
    ids += token_ids[done:]
    return ids, starts


def _found(token_ids: Sequence[int], placeholder_id: int, images: Sequence[ImageIds]) -> list[int]:
    """Where images begin in a prompt that has all of their tokens."""
    starts: list[int] = []
    done = 0
    for number, image in enumerate(images):
        start = token_ids.index(placeholder_id, done) - image.token_ids.index(placeholder_id)
        done = start + len(image.token_ids)
        if list(token_ids[max(0, start) : done]) != image.token_ids:
            raise ValueError(
                f"the prompt has the {image.num_features} placeholders (token id {placeholder_id}) of image {number}, "
                "and not the other tokens that belong to them; give one placeholder for each image"
            )
        starts.append(start)
    return starts


def _mismatch(count: int, num_images: int, placeholder_id: int, num_features: int = 0) -> ValueError:
    or_all = f" (or {num_features}, one for each of their features)" if num_features else ""
    images, placeholders = checks.counted(num_images, "image"), checks.counted(count, "image placeholder")
    return ValueError(
        f"the prompt has {placeholders} (token id {placeholder_id}) for {images}; give one for each image{or_all}"
    )
