"""Images of prompts in the scheduler: how the prefix cache knows them, and how many a step may begin.

The positions of an image hold the same placeholder id whatever it shows. To the prefix cache they have an id made of
the image's content, so that equal images share pages and no other text or image does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.protocol.messages import Media


def with_image_keys(token_ids: list[int], media: Sequence[Media]) -> list[int]:
    """The ids of a prompt for the prefix cache: at the positions of an image an id below 0, which is its content.

    One id for all positions of an image is enough: its content also says how many there are.
    """
    found = token_ids.copy()
    for image in media:
        key = -1 - int.from_bytes(image.content, "big")
        found[image.start : image.start + image.num_tokens] = [key] * image.num_tokens
    return found


class ImageBudget:
    """Bounds the images that one step begins, since the vision tower computes each of them whole.

    They have up to ``chunk_tokens`` features together; a larger one is the only one that its step begins.
    """

    __slots__ = ("_is_untouched", "_keeps_whole", "_left", "_may_exceed")

    def __init__(self, chunk_tokens: int, *, keeps_whole: bool) -> None:
        """keeps_whole: the tokens of an image are computed in one step, of which one image may exceed the budget."""
        self._left = chunk_tokens
        self._is_untouched = True
        self._keeps_whole = self._may_exceed = keeps_whole

    def limited(self, media: Sequence[Media], start: int, count: int, *, is_first: bool) -> int:
        """How many of the ``count`` tokens of a prompt from ``start`` on can be computed in this step; takes their
        images.

        is_first: nothing of the prompt was computed in the steps before. An image that began in one of them costs
        nothing: its features are kept.
        """
        for image in media:
            begins = image.start >= start or (is_first and image.start + image.num_tokens > start)
            if not begins or image.start >= start + count:
                continue
            if image.num_features > self._left and not self._is_untouched:
                return max(image.start - start, 0)
            self._left -= image.num_features
            self._is_untouched = False
        return self._whole(media, start, count) if self._keeps_whole else count

    def _whole(self, media: Sequence[Media], start: int, count: int) -> int:
        """The same number, or another one that divides no image."""
        for image in media:
            end = image.start + image.num_tokens
            if image.start < start + count < end:
                if image.start > start:
                    return image.start - start
                if not self._may_exceed:
                    return 0
                self._may_exceed = False
                return end - start
        return count
